"""Wrapped modules in loops of PyTorch, beside the same modules unwrapped."""

from __future__ import annotations

import copy
import io
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="the package torch is not installed: extra torch")

from relax_grad.frontend.torch import wrap  # noqa: E402

wrap_module = sys.modules["relax_grad.frontend.torch.run.wrap"]

checkpoint = torch.utils.checkpoint.checkpoint
F, nn = torch.nn.functional, torch.nn


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def perceptron():
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3))


X, Y = torch.randn(8, 6), torch.randint(0, 3, (8,))


@pytest.fixture(scope="module")
def dense():
    """Return a wrapped perceptron, whose functions are compiled once; tests copy it."""
    torch.manual_seed(0)
    return wrap(perceptron(), (X,))


@pytest.fixture
def pair(dense):
    model = copy.deepcopy(dense)
    return model, copy.deepcopy(model._original)


def agree(ours, other, tolerance=1e-5):
    """Assert that two modules have the same values."""
    for (key, a), b in zip(ours.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(
            a, b, rtol=tolerance, atol=tolerance, msg=lambda m, k=key: f"{k}: {m}"
        )


def train(model, optimizer, x=X, y=Y, steps=5, accumulate=1, clip=None, scheduler=None):
    """Train, and return the losses."""
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(accumulate):
            loss = F.cross_entropy(model(x), y) / accumulate
            loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


def test_sgd_with_momentum(pair):
    losses, wanted = (
        train(module, torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)) for module in pair
    )
    assert losses == pytest.approx(wanted, rel=1e-5)
    agree(*pair)


def test_adamw_with_a_schedule_clipping_and_accumulation(pair):
    def run(model):
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
        return train(model, optimizer, accumulate=2, clip=0.5, scheduler=scheduler)

    losses, wanted = map(run, pair)
    assert losses == pytest.approx(wanted, rel=1e-5)
    agree(*pair, tolerance=1e-4)


def test_accelerate(pair):
    accelerate = pytest.importorskip("accelerate", reason="the package accelerate is not installed")

    def run(model):
        tool = accelerate.Accelerator(cpu=True)
        model, optimizer = tool.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        losses = []
        for _ in range(3):
            loss = F.cross_entropy(model(X), Y)
            optimizer.zero_grad()
            tool.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        return losses

    assert run(pair[0]) == pytest.approx(run(pair[1]), rel=1e-5)


def test_the_module_keeps_its_tensors_and_keys(dense):
    model = copy.deepcopy(dense)
    original = model._original
    assert list(model.state_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert all(a is b for a, b in zip(model.parameters(), original.parameters(), strict=True))
    state = {key: torch.zeros_like(tensor) for key, tensor in model.state_dict().items()}
    model.load_state_dict(state)
    assert not model(X).any()
    file = io.BytesIO()
    torch.save(dense.state_dict(), file)
    file.seek(0)
    model.load_state_dict(torch.load(file))
    torch.testing.assert_close(model(X), dense(X))
    assert next(iter(nn.ModuleDict({"a": model}).state_dict())) == "a.0.weight"


def test_a_copy_trains_alone(dense):
    model = copy.deepcopy(dense)
    train(model, torch.optim.SGD(model.parameters(), 1.0), steps=1)
    weights = (module.get_parameter("0.weight") for module in (model, dense))
    assert not torch.equal(*weights)
    assert model._parameters is model._original._parameters


def test_gradients_only_where_they_are_wanted(pair):
    for module in pair:
        module.get_parameter("0.weight").requires_grad_(False)
    inputs = [X.clone().requires_grad_() for _ in pair]
    for module, x in zip(pair, inputs, strict=True):
        F.cross_entropy(module(x), Y).backward()
    assert pair[0].get_parameter("0.weight").grad is None
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    for (key, a), b in zip(pair[0].named_parameters(), pair[1].parameters(), strict=True):
        if key != "0.weight":
            torch.testing.assert_close(a.grad, b.grad)


def test_without_gradients(pair):
    model, reference = pair
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            output = model(X)
        assert not output.requires_grad
        torch.testing.assert_close(output, reference(X).detach())


def test_strided_inputs_and_gradients(pair):
    x = torch.randn(6, 8).T
    output, wanted = (module(x) for module in pair)
    torch.testing.assert_close(output, wanted)
    for result in (output, wanted):
        result.sum().backward()  # its cotangent has strides of 0
    torch.testing.assert_close(
        pair[0].get_parameter("0.weight").grad, pair[1].get_parameter("0.weight").grad
    )
    unaligned = torch.randn(49)[1:].view(8, 6)
    torch.testing.assert_close(pair[0](unaligned), pair[1](unaligned))


def test_backward_twice_is_an_error_of_pytorch(pair):
    loss = F.cross_entropy(pair[0](X), Y)
    loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_a_parameter_written_before_backward_is_an_error_of_pytorch(pair):
    loss = F.cross_entropy(pair[0](X), Y)
    with torch.no_grad():
        pair[0].get_parameter("2.weight").mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    ("x", "reason"),
    [
        (X[:5], r"input has shape \(5, 6\).*compiled for \(8, 6\)"),
        (X.double(), "dtype torch.float64, but the functions were compiled for"),
        (X.to("meta"), "on the device meta.*on the CPU"),
        (X.to_sparse(), "layout torch.sparse_coo"),
    ],
)
def test_inputs_that_do_not_fit(pair, x, reason):
    pair[0](X)  # compiles the functions, if this test comes first in its process
    with pytest.raises(ValueError, match=reason):
        pair[0](x)


def test_other_arguments_that_do_not_fit(pair):
    model = pair[0]
    with pytest.raises(TypeError, match="input"):
        model()
    with pytest.raises(TypeError, match="input must be a tensor"):
        model(3)
    torch.testing.assert_close(model(input=X), model(X))
    with torch.autocast("cpu"), pytest.raises(ValueError, match=r"outside of torch\.autocast"):
        model(X)
    model.double()
    with pytest.raises(ValueError, match=r"0\.weight has shape .* and dtype torch.float64"):
        model(X)


def test_a_move_to_another_device_is_refused(pair):
    """Also as a part of a module that moves; conversions on the CPU go on."""
    model, _ = pair
    elsewhere = SimpleNamespace(device=torch.device("mps:0"))
    with pytest.raises(ValueError, match=r"and on GPUs of CUDA, and not on mps:0: move it"):
        torch.nn.Sequential(model)._apply(lambda tensor: elsewhere)
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
    assert model.to("cpu", torch.float32) is model


def test_arguments_of_wrap():
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module"):
        wrap(F.relu, (X,))
    with pytest.raises(ValueError, match="target must be a CPU"):
        wrap(perceptron(), (X,), target="cuda")
    with pytest.raises(TypeError, match="compile_options must be a mapping"):
        wrap(perceptron(), (X,), compile_options=3)
    with pytest.raises(ValueError, match="wrapped already"):
        wrap(wrap(perceptron(), (X,)), (X,))


class Network(nn.Module):
    """A CNN with normalisation and dropout, which returns a dict."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(4, 3)

    def forward(self, image, *, scale=1.0):
        features = self.drop(torch.relu(self.norm(self.conv(image)))).mean((2, 3))
        return {"scores": self.head(features) * scale, "parts": (features, None), "scale": scale}


def test_states_modes_dropout_and_structures():
    image = torch.randn(4, 1, 6, 6)
    model = wrap(Network(), (image,), {"scale": 2.0}, dynamic_shapes={"image": {0: "batch"}})
    reference = copy.deepcopy(model._original)

    torch.manual_seed(3)
    first = model(image, scale=2.0)
    torch.manual_seed(3)
    again, other = model(image, scale=2.0), model(image, scale=2.0)
    assert torch.equal(first["scores"], again["scores"])
    assert not torch.equal(first["scores"], other["scores"])
    assert first["parts"][1] is None
    assert first["scale"] == 2.0
    with pytest.raises(ValueError, match=r"scale is 3.0, but 2.0 was given to wrap"):
        model(image, scale=3.0)

    for _ in range(3):
        reference(image)
    for key in ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"):
        torch.testing.assert_close(model.get_buffer(key), reference.get_buffer(key))

    model.drop.eval()  # each submodule has a mode
    reference.drop.eval()
    batch = torch.randn(7, 1, 6, 6)
    output, wanted = model(batch, scale=2.0), reference(batch, scale=2.0)
    torch.testing.assert_close(output["scores"], wanted["scores"])
    for result in (output, wanted):
        (result["scores"].square().sum() + result["parts"][0].sum()).backward()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)

    model.eval()
    reference.eval()
    assert not model._original.training
    torch.testing.assert_close(
        model(batch, scale=2.0)["scores"], reference(batch, scale=2.0)["scores"]
    )
    agree(model, reference)


class Returning(nn.Module):
    """A module whose results share memory with an argument or with each other."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        y = torch.exp(x * self.scale)
        return x, y, y.view(-1), y.detach(), (y > 1).long()


def test_outputs_have_memory_of_their_own():
    x = torch.randn(3, 4)
    before = x.clone()
    model = wrap(Returning(), (x,))
    for _ in range(2):
        same, y, flat, stopped, mask = model(x)
        assert y.requires_grad
        assert not stopped.requires_grad
        assert not mask.requires_grad
        kept = y.detach().clone()
        with torch.no_grad():
            same.zero_()
            flat.zero_()
        assert torch.equal(x, before)
        assert torch.equal(y, kept)
    y.sum().backward()
    torch.testing.assert_close(model.scale.grad, (kept * x).sum(0))


def backward(*pairs):
    """Compute gradients of two modules that must agree."""
    grads = []
    for module, loss in pairs:
        module.zero_grad()
        loss(module).backward()
        grads.append([param.grad for param in module.parameters()])
    for grad, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(grad, wanted)


def loss_of(module):
    return F.cross_entropy(module(X), Y)


def replaced_by_assignment(module):
    torch.manual_seed(1)
    state = {key: torch.randn(tensor.shape) for key, tensor in module.state_dict().items()}
    module.load_state_dict(state, assign=True)


def replaced_data(module):
    torch.manual_seed(1)
    for param in module.parameters():
        param.data = torch.randn(param.shape)


def strided_data(module):
    """The address stays, and the order of the elements changes."""
    torch.manual_seed(1)
    square = next(param for param in module.parameters() if param.ndim == 2)
    square.data = torch.randn(square.shape[::-1]).T


def written_in_place(module):
    with torch.no_grad():
        for param in module.parameters():
            param.mul_(2)


def moved_and_back(module):
    module.double().float()


def new_parameter(module):
    torch.manual_seed(1)
    module.get_submodule("0").weight = nn.Parameter(torch.randn(16, 6))


@pytest.mark.parametrize(
    "change",
    [
        replaced_by_assignment,
        replaced_data,
        strided_data,
        written_in_place,
        moved_and_back,
        new_parameter,
    ],
)
def test_changed_parameters_are_read_at_each_call(pair, change):
    for _ in range(2):
        backward(*((module, loss_of) for module in pair))
    for module in pair:
        change(module)
    for _ in range(2):
        backward(*((module, loss_of) for module in pair))


def test_two_forward_passes_before_a_backward_pass(pair):
    other = torch.randn(8, 6)

    def both(module):
        first, second = module(X), module(other)
        with torch.no_grad():
            module(other)
        return first.square().sum() + second.sum()

    backward(*((module, both) for module in pair))


def test_gradients_are_neither_copied_nor_shared(pair):
    model = pair[0]
    graph = loss_of(model)
    graph.backward(retain_graph=True)
    first = [param.grad for param in model.parameters()]
    kept = [grad.clone() for grad in first]
    for param in model.parameters():
        param.grad = None
    graph.backward()
    for param, old, value in zip(model.parameters(), first, kept, strict=True):
        assert param.grad.data_ptr() != old.data_ptr()
        torch.testing.assert_close(old, value)
        torch.testing.assert_close(param.grad, value)


def test_residuals_live_as_long_as_the_graph_needs_them(pair):
    loss = loss_of(pair[0])
    holder = loss.grad_fn
    while not hasattr(holder, "is_whole"):
        holder = holder.next_functions[0][0]
    assert holder.saved_tensors[-1].residuals
    loss.backward(retain_graph=True)
    kept = weakref.ref(holder.saved_tensors[-1])
    assert kept() is not None
    loss.backward()
    assert kept() is None


def test_contexts_that_replace_saved_tensors(pair):
    def on_cpu(module):
        with torch.autograd.graph.save_on_cpu():
            loss = loss_of(module)
        return loss

    def packed(module):
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: tensor.numpy().copy(), torch.from_numpy
        ):
            loss = module(X).square().sum()
        return loss

    def computed_again(module):
        return F.cross_entropy(checkpoint(module, X, use_reentrant=False), Y)

    def in_another_graph(module):
        return F.cross_entropy(
            checkpoint(module, X.clone().requires_grad_(), use_reentrant=True), Y
        )

    backward(*((module, on_cpu) for module in pair))
    backward((pair[0], packed), (pair[1], lambda module: module(X).square().sum()))
    backward(*((module, computed_again) for module in pair))
    backward(*((module, in_another_graph) for module in pair))


def test_gradients_of_gradients_are_an_error(pair):
    loss = loss_of(pair[0])
    grads = torch.autograd.grad(loss, list(pair[0].parameters()), create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grads[0].sum().backward()


def test_a_changed_module_is_traced_again(pair):
    model, reference = pair
    model(X)
    for module in (model, reference):
        torch.manual_seed(1)
        module.set_submodule("1", nn.Tanh())
    torch.testing.assert_close(model(X), reference(X))
    for module in (model, reference):
        module.get_submodule("0").bias = None
    torch.testing.assert_close(model(X), reference(X))


def test_objects_that_cannot_be_returned():
    class Holder:
        pass

    class Module(nn.Module):
        def forward(self, x):
            return x * 2, Holder()

    with pytest.raises(ValueError, match="returns a Holder"):
        wrap(Module(), (X,))(X)


class Annealed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.temperature = nn.Linear(4, 6), nn.BatchNorm1d(6), 1.0

    def forward(self, x):
        return self.norm(self.linear(x)) / self.temperature


def test_attributes_that_change_take_effect():
    """An attribute of the wrapper is that of the module."""
    module = Annealed()
    other, x = copy.deepcopy(module), torch.randn(5, 4)
    wrapped = wrap(module, (x,))
    wrapped.temperature = 3.0  # before the first call
    other.temperature = 3.0
    for change in (lambda m: setattr(m, "temperature", 2.0), lambda m: setattr(m.norm, "eps", 1.0)):
        torch.testing.assert_close(wrapped(x), other(x))
        change(wrapped)
        change(other)
    torch.testing.assert_close(wrapped(x), other(x))
    agree(wrapped, other)
    assert module.temperature == 2.0
    wrapped.label = "name"  # forward does not read it
    wrapped(x)
    assert module.label == "name"
    del wrapped.label
    assert not hasattr(module, "label")
    # The functions for earlier values are kept.
    (programs,) = wrapped._functions._programs.values()
    before = list(programs)
    assert len(before) == 3
    wrapped.norm.eps = 1e-5
    wrapped(x)
    (programs,) = wrapped._functions._programs.values()
    assert set(programs) == set(before)


def test_attributes_of_a_module_with_a_layer_twice():
    """The trace sees such modules through proxies."""
    layer = Annealed()
    module = nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(6, 4), layer)
    other, x = copy.deepcopy(module), torch.randn(5, 4)
    wrapped = wrap(module, (x,))
    for temperature in (1.0, 3.0):
        module[1].temperature = other[1].temperature = temperature
        torch.testing.assert_close(wrapped(x), other(x), rtol=1e-4, atol=1e-5)


def test_parameters_without_influence():
    module = Annealed()
    module.unused = nn.Parameter(torch.ones(2))
    wrapped = wrap(module, (torch.randn(5, 4),))
    wrapped(torch.randn(5, 4)).sum().backward()
    assert not module.unused.grad.any()


def test_embedding_bags_of_symbolic_rows():
    """The backward function slices by a symbolic extent."""
    module = nn.EmbeddingBag(5, 4)
    places = torch.randint(0, 5, (3, 6))
    wrapped = wrap(module, (places,), dynamic_shapes={"input": {0: "batch"}})
    for rows in (3, 1, 7):
        places = torch.randint(0, 5, (rows, 6))
        gradients = (
            torch.autograd.grad(m(places).exp().sum(), m.weight) for m in (wrapped, module)
        )
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_many_values_of_an_attribute_warn(monkeypatch):
    wrapped = wrap(nn.Dropout(0.5), (X,))
    wrapped.eval()
    monkeypatch.setattr(wrap_module, "_MOST_PROGRAMS", 1)
    wrapped(X)
    wrapped.p = 0.25
    with pytest.warns(RuntimeWarning, match="attribute p of Dropout has changed; make it a tensor"):
        wrapped(X)


def test_the_first_call_in_a_checkpoint():
    module = nn.Sequential(nn.Linear(6, 4), nn.Tanh())
    other = copy.deepcopy(module)
    wrapped = wrap(module, (X,))
    checkpoint(wrapped, X, use_reentrant=False).pow(2).sum().backward()
    other(X).pow(2).sum().backward()
    for ours, wanted in zip(module.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, wanted.grad)


def test_threads(dense):
    """Forward and backward from several threads, of which the first ones compile."""
    model = copy.deepcopy(dense)
    model._functions.clear()
    other, batches = copy.deepcopy(model._original), [torch.randn(8, 6) for _ in range(4)]

    def run(module, batch):
        worst = []
        for _ in range(20):
            data = batch.clone().requires_grad_()
            output = module(data)
            (gradient,) = torch.autograd.grad(output.pow(2).sum(), data)
            worst = [output.detach(), gradient]
        return worst

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda batch: run(model, batch), batches))
    for result, batch in zip(results, batches, strict=True):
        torch.testing.assert_close(result, run(other, batch), rtol=1e-4, atol=1e-5)
    (programs,) = model._functions._programs.values()
    assert len(programs) == 1
