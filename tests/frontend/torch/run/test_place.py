"""Wrapped modules on a GPU, on a stand-in whose tensors are those of the CPU."""

from __future__ import annotations

import copy

import pytest
import tvm

torch = pytest.importorskip("torch", reason="the package torch is not installed: extra torch")

from scheduled import sorted_on_host  # noqa: E402
from torch_elsewhere import THERE, elsewhere, train  # noqa: E402

from relax_grad.frontend.torch import wrap  # noqa: E402
from relax_grad.frontend.torch.run import place  # noqa: E402

nn = torch.nn


@pytest.fixture
def there():
    with elsewhere() as made:
        yield made


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def network():
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 3))


X, Y = torch.randn(8, 6), torch.randint(0, 3, (8,))


def test_a_module_trains_where_it_is(there):
    """It is compiled again after a move, and its graph is not traced again."""
    original = network()
    reference = copy.deepcopy(original)
    model = wrap(original, (X,))
    assert train(model, X, Y) == pytest.approx(train(reference, X, Y), rel=1e-5)
    assert not there.called
    (programs,) = model._functions._programs.values()
    for module in (model, reference):
        module.cuda()
        assert {tensor.device for tensor in module.state_dict().values()} == {THERE}
    x, y = X.cuda(), Y.cuda()
    assert train(model, x, y) == pytest.approx(train(reference, x, y), rel=1e-5)
    assert there.called == ["forward", "backward"] * 3
    assert model(x).device == model.get_parameter("0.weight").grad.device == THERE
    reference(x)
    for module in (model, reference):
        module.cpu()
    assert train(model, X, Y) == pytest.approx(train(reference, X, Y), rel=1e-5)
    torch.testing.assert_close(model.state_dict(), reference.state_dict(), rtol=1e-4, atol=1e-5)
    model.cuda()(x)
    assert there.machines == 1
    assert list(model._functions._programs.values()) == [programs]


class Layers(nn.Module):
    """Layers whose trace reads more than their parameters, and random numbers."""

    def __init__(self):
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(9, 4), nn.LSTM(4, 5)
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.embedding.weight
        self.project = nn.Linear(5, 4)
        self.drop = nn.Dropout(0.5)

    def forward(self, tokens):
        hidden, _ = self.lstm(self.embedding(tokens))
        return self.head(self.drop(self.project(hidden)))


@pytest.mark.filterwarnings("ignore:PyTorch was compiled without cuDNN")
def test_the_same_numbers_as_on_the_cpu(there):
    """The example may be on the device, too. Indices are checked, and weights stay tied."""
    tokens = torch.randint(0, 9, (7, 2))
    model = Layers()
    here = wrap(copy.deepcopy(model), (tokens,))
    model.cuda()
    parameters = list(model.parameters())
    moved = wrap(model, (tokens.cuda(),))
    results = []
    for module, x in ((here, tokens), (moved, tokens.cuda())):
        torch.manual_seed(7)
        output = module(x)
        output.square().sum().backward()
        results.append([output.detach(), *(p.grad for p in module.parameters())])
    with torch._C.DisableTorchFunction():
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)
    assert all(a is b for a, b in zip(parameters, moved.parameters(), strict=True))
    assert all(
        a is b for a, b in zip(model.lstm._flat_weights, model.lstm.parameters(), strict=True)
    )
    with pytest.raises(IndexError, match="tokens"):
        moved(torch.full((7, 2), 9).cuda())


def test_each_call_waits_for_the_other_streams(there):
    """TVM's allocator gives freed memory to the next call, in whatever stream it runs. The stand-in
    asserts the order at each call."""
    model = wrap(nn.Linear(6, 3), (X,)).cuda()
    x = X.cuda()
    first, second = there.side_stream(), there.side_stream()
    for stream in (there.default, first, second, second, first, there.default):
        there.stream = stream
        model(x).sum().backward()
        model(x).exp()  # later work on the result
    assert there.called.count("forward") == 12
    assert set(second.waited) == {0, 1}


def test_other_devices_are_refused(there):
    model = wrap(network(), (X,)).cuda()
    with pytest.raises(ValueError, match=r"on the device cpu.*dense tensors on cuda:0, where the"):
        model(X)
    other = there.claim(X.clone(), torch.device("cuda:1"))
    with pytest.raises(ValueError, match=r"on the device cuda:1.*move it by \.to\(\"cuda:0\"\)"):
        model(other)
    model.get_parameter("3.bias").data = torch.zeros(3)
    with pytest.raises(ValueError, match=r"3\.bias is .* on the device cpu, but.*on cuda:0"):
        model(X.cuda())
    with pytest.raises(ValueError, match=r"on the device cuda:0.*dense tensors on the CPU"):
        model.cpu()(X.cuda())


def test_autocast_and_captures_are_refused(there, monkeypatch):
    class Casting(nn.Module):
        def forward(self, x):
            with torch.autocast("cuda", torch.bfloat16):
                return x @ x

    x = torch.randn(4, 4)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
        patch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
        inner = wrap(Casting(), (x,))
        assert inner(x).dtype == torch.float32  # on the CPU, the region has no effect
    with pytest.raises(ValueError, match=r"the module enters torch\.autocast\(\"cuda\"\)"):
        inner(x.cuda())
    model = wrap(network(), (X,)).cuda()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "is_autocast_enabled", lambda kind: kind == "cuda")
        with pytest.raises(ValueError, match=r"call it outside of torch\.autocast"):
            model(X.cuda())
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(ValueError, match="cannot be captured in a CUDA graph"):
            model(X.cuda())
    with (
        tvm.transform.PassContext(config={"relax.backend.use_cuda_graph": True}),
        pytest.raises(ValueError, match="Call the module outside of this PassContext"),
    ):
        model(X.cuda())


def test_gradients_of_gradients_are_refused(there):
    model = wrap(nn.Linear(6, 3), (X,)).cuda()
    x = X.cuda().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_functions_that_would_run_on_the_host_are_refused():
    def compiled(module, target, settings, _remedy):
        with target:
            settings["relax_pipeline"](module)

    message = r"no schedule for sorted.*on the host.*Move it by \.cpu\(\), or write the model"
    settings = {"relax_pipeline": place.PIPELINE}
    with elsewhere(compiled), pytest.raises(ValueError, match=message):
        place.place_of(X.cuda()).machine(sorted_on_host(), tvm.target.Target("llvm"), settings)


def test_a_tvm_without_support(monkeypatch):
    device = torch.device("cuda:1")
    monkeypatch.setattr(tvm.runtime, "enabled", lambda _: False)
    with pytest.raises(RuntimeError, match=r"a module on cuda:1 needs a TVM.*by \.cpu\(\)"):
        place._place(device)
    monkeypatch.setattr(tvm.runtime, "enabled", lambda _: True)
    with pytest.raises(RuntimeError, match=r"a module on cuda:1 does not exist: there are 0 such"):
        place._place(device)
