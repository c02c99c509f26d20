"""Recomputation in training steps: the same bits with less memory."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from programs import build, tensor
from tvm import relax, tirx
from tvm.relax import op

from relax_grad.cpu.memory import _lowered, planned
from relax_grad.cpu.target import host
from relax_grad.ir.bindings import bindings_of
from relax_grad.ir.remat import REMAT, as_attribute, from_attribute
from relax_grad.op import checkpoint, recurrent
from relax_grad.training import SGD, AdamW, Trainer, memory_of, train_step

ROWS, WIDTH = 256, 64
RNG = np.random.default_rng(0)


def perceptron(body=None, depth=4):
    """Return the module of a network whose activations are larger than its parameters."""
    x = tensor("x", (ROWS, WIDTH), "float32")
    params = [tensor(f"w{i}", (WIDTH, WIDTH), "float32") for i in range(depth)]

    def layer(bb, y, w):
        y = bb.emit(op.matmul(y, w))
        return bb.emit(op.multiply(bb.emit(op.tanh(y)), bb.emit(op.sigmoid(y))))

    def loss(bb, x, *params):
        for w in params:
            x = (body or layer)(bb, x, w)
        return op.mean(bb.emit(op.multiply(x, x)))

    module = build([x, *params], loss)
    return module, [param.name for param in params]


def steps(remat, make=perceptron):
    module, names = make()
    module["loss"] = module["main"].with_attr("global_symbol", "loss")
    del module["main"]
    return train_step(module, SGD(0.1, momentum=0.9), wrt=names, remat=remat)


def trained(step, batches, values=None):
    """Return the losses and all tensors after a step with each batch, as bytes."""
    trainer = Trainer(step, values=values, seed=3)
    losses = [trainer.step(*batch).loss for batch in batches]
    tensors = {**trainer.values, **trainer.optimizer_state}
    return losses, {name: param.numpy().tobytes() for name, param in tensors.items()}


def start(step):
    rng = np.random.default_rng(1)
    types = {**step.params, **step.frozen, **step.states}
    return {
        name: (0.3 * rng.normal(size=[int(n) for n in kind.shape.values])).astype("float32")
        for name, kind in types.items()
    }


def is_kept(call: relax.Call) -> bool:
    return "matmul" in call.args[0].name_hint


@pytest.fixture(scope="module")
def plain():
    """Return the memory of the perceptron's step without recomputation, batches and results."""
    step = steps(None)
    batches = [(RNG.normal(size=(ROWS, WIDTH)).astype("float32"),) for _ in range(3)]
    return memory_of(step), batches, trained(step, batches, start(step))


@pytest.mark.parametrize(
    "remat",
    ["auto", "nothing_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable", is_kept, 0.8],
)
def test_a_perceptron_has_the_same_bits(plain, remat):
    whole, batches, wanted = plain
    budget = isinstance(remat, float)
    remat = int(remat * whole.peak) if budget else remat
    step = steps(remat)
    memory = memory_of(step)
    assert trained(step, batches, start(step)) == wanted
    if budget:
        assert memory.peak <= remat
    elif remat != "nothing_saveable":  # it computes the whole forward pass again
        assert memory.peak < whole.peak
    assert memory.params == whole.params == 4 * 4 * WIDTH * WIDTH
    assert memory.batch == 4 * ROWS * WIDTH
    # The loss and perhaps the number of the step; all others take the memory of the old ones.
    assert memory.results <= 12
    assert memory.total == sum(
        getattr(memory, group)
        for group in ("params", "optimizer_state", "batch", "results", "intermediate")
    )


def test_everything_saveable_is_no_recomputation(plain):
    assert memory_of(steps("everything_saveable")) == plain[0]


def wide(body=None):
    """Return the module of a network whose products take nearly all of the time."""
    x = tensor("x", (1024, 1024), "float32")
    params = [tensor(f"w{i}", (1024, 1024), "float32") for i in range(3)]

    def loss(bb, x, *params):
        for w in params:
            x = bb.emit(op.matmul(x, w))
            x = bb.emit(op.multiply(bb.emit(op.tanh(x)), bb.emit(op.sigmoid(x))))
        return op.mean(bb.emit(op.multiply(x, x)))

    return build([x, *params], loss), [param.name for param in params]


def without_products():
    """Return the module of a network of element-wise functions and sums alone."""
    x = tensor("x", (ROWS, WIDTH), "float32")
    params = [tensor(f"w{i}", (WIDTH,), "float32") for i in range(4)]

    def loss(bb, x, *params):
        for w in params:
            y = bb.emit(op.tanh(bb.emit(op.multiply(x, w))))
            x = bb.emit(op.subtract(y, bb.emit(op.mean(y, -1, keepdims=True))))
        return op.mean(bb.emit(op.multiply(x, x)))

    return build([x, *params], loss), [param.name for param in params]


def test_light_calls_are_repeated_where_products_take_the_time():
    whole, light, every = (memory_of(steps(r, wide)).peak for r in (None, "light", "auto"))
    assert every <= light < 0.9 * whole


def test_light_calls_stay_where_they_take_a_large_share_of_the_time():
    every = memory_of(steps("auto", without_products)).peak
    light = memory_of(steps("light", without_products)).peak
    assert every < light == memory_of(steps(None, without_products)).peak


@pytest.mark.parametrize("kind", ["attention", "lstm"])
def test_attention_and_recurrent_layers_are_not_cheap(kind):
    """Their kernels compute matrix products."""

    def attention():
        x, w = tensor("x", (2, 64, 2, 32), "float32"), tensor("w", (32, 32), "float32")

        def loss(bb, x, w):
            for _ in range(2):
                y = bb.emit(op.matmul(x, w))
                x = bb.emit(op.nn.attention(y, y, y))
            return op.mean(bb.emit(op.multiply(x, x)))

        return build([x, w], loss), ["w"]

    def lstm():
        x, w = tensor("x", (24, 4, 128), "float32"), tensor("w", (128, 32), "float32")
        start = [tensor(name, (4, 32), "float32") for name in ("h", "c")]

        def loss(bb, x, h, c, w):
            states = bb.emit(relax.TupleGetItem(bb.emit(recurrent.lstm(x, h, c, w)), 0))
            return op.mean(bb.emit(op.multiply(states, states)))

        return build([x, *start, w], loss), ["w"]

    make = {"attention": attention, "lstm": lstm}[kind]

    def forward_kernels(remat):
        mod = _lowered(steps(remat, make).module, host())
        values = (binding.value for binding in bindings_of(mod["step"].body))
        callees = (value.op for value in values if isinstance(value, relax.Call))
        names = [getattr(callee, "name_hint", "") for callee in callees]
        return sum(kind in name and "backward" not in name for name in names)

    kept = forward_kernels(None)
    assert kept == forward_kernels("auto") == forward_kernels("dots_saveable") > 0
    assert forward_kernels("nothing_saveable") == 2 * kept


def test_a_budget_that_cannot_be_met_is_an_error_with_the_least_peak(plain):
    whole = plain[0].peak
    with pytest.raises(
        ValueError, match=r"remat: .* at least \d+ bytes, but the budget is 1000"
    ) as e:
        memory_of(steps(1000))
    least = int(str(e.value).rpartition("at least ")[2].split()[0])
    assert least < whole
    assert memory_of(steps(least)).peak == least


def test_the_planned_peak_is_within_a_drawn_budget():
    """Also where repeated calls keep new running statistics, and slots of the optimizer, out of the
    memory of the old ones."""
    torch = pytest.importorskip("torch")
    from relax_grad.frontend.torch import from_module

    def layer(i, o):
        return [torch.nn.Conv2d(i, o, 3, padding=1), torch.nn.BatchNorm2d(o), torch.nn.GELU()]

    rest = [torch.nn.Dropout(0.2), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()]
    pool = torch.nn.MaxPool2d(2)
    net = torch.nn.Sequential(*layer(3, 8), *layer(8, 8), pool, *layer(8, 16), *rest)
    x, y = torch.zeros(4, 3, 16, 16), torch.zeros(4, dtype=torch.int64)
    loss = torch.nn.functional.cross_entropy
    model = from_module(net, (x,), loss=loss, targets=(y,))

    def peak(budget):
        return memory_of(train_step(model, AdamW(0.01), remat=budget)).peak

    whole = peak(None)
    with pytest.raises(
        ValueError, match=r"remat: .* at least \d+ bytes, but the budget is 1$"
    ) as e:
        peak(1)
    least = int(str(e.value).rpartition("at least ")[2].split()[0])
    assert least < 0.8 * whole
    with pytest.raises(ValueError, match=f"at least {least} bytes, but the budget is {least - 1}$"):
        peak(least - 1)
    # The order of bindings is estimated before the plan, and scalars may share a storage in it.
    assert least - 64 <= peak(least) <= least
    budget = int(RNG.integers(least, whole))
    assert peak(budget) <= budget


def test_marked_segments_stay_checkpoints(plain):
    def layer(bb, x, w):
        def body(x, w):
            y = bb.emit(op.matmul(x, w))
            return bb.emit(op.multiply(bb.emit(op.tanh(y)), bb.emit(op.sigmoid(y))))

        return bb.emit(checkpoint(body, x, w))

    def make():
        return perceptron(layer)

    marked = steps(None, make)
    step = steps("auto", make)
    batches = [(RNG.normal(size=(ROWS, WIDTH)).astype("float32"),) for _ in range(2)]
    assert trained(step, batches, start(step)) == trained(marked, batches, start(marked))
    peak = memory_of(marked).peak
    assert peak < plain[0].peak
    assert memory_of(step).peak <= peak


def test_values_that_calls_write_to_are_not_computed_again():
    """The call that scales ``a`` in place would scale a repeated ``a`` not at all."""
    x = relax.Var("x", relax.TensorType((ROWS, WIDTH), "float32"))
    bb = relax.BlockBuilder()

    @tvm.script.tirx.prim_func
    def scale(a: tvm.script.tirx.Buffer((ROWS, WIDTH), "float32")):
        for i, j in tvm.script.tirx.grid(ROWS, WIDTH):
            a[i, j] = a[i, j] * tvm.script.tirx.float32(3)

    with bb.function("step", [x]):
        variable = bb.add_func(scale, "scale")
        with bb.dataflow():
            a = bb.emit(op.exp(x))
            b = bb.emit(relax.op.call_tir_inplace(variable, relax.Tuple([a]), [0], x.ty))
            c = bb.emit(op.tanh(b))
            loss = bb.emit_output(op.sum(c))
            gradient = bb.emit_output(op.multiply(op.multiply(c, b), op.add(x, loss)))
        bb.emit_func_output(relax.Tuple([loss, relax.Tuple([gradient])]))
    module = bb.get()
    value = RNG.normal(size=(ROWS, WIDTH)).astype("float32")
    results = []
    for remat in (None, "nothing_saveable"):
        if remat is not None:
            module["step"] = module["step"].with_attr(REMAT, remat)
        executable = tvm.compile(module, host(), relax_pipeline="relax_grad")
        result = relax.VirtualMachine(executable, tvm.cpu())["step"](tvm.runtime.tensor(value))
        results.append([result[0].numpy(), result[1][0].numpy()])
    for first, other in zip(*results, strict=True):
        np.testing.assert_array_equal(first, other)


@pytest.mark.parametrize(
    ("remat", "error", "message"),
    [
        ("least", ValueError, "remat must be one of 'light', 'auto', 'everything_saveable'"),
        (0, ValueError, "remat must be a positive number of bytes"),
        (True, TypeError, "remat must be None, 'light'"),
        (1.5, TypeError, "remat must be None, 'light'"),
    ],
)
def test_wrong_settings(remat, error, message):
    with pytest.raises(error, match=message):
        steps(remat)


def with_symbolic_batch():
    n = tirx.Var("n", "int64")
    x, w = tensor("x", (n, WIDTH), "float32"), tensor("w", (WIDTH, WIDTH), "float32")

    def loss(bb, x, w):
        y = bb.emit(op.tanh(bb.emit(op.matmul(x, w))))
        return op.mean(bb.emit(op.multiply(y, y)))

    return build([x, w], loss), ["w"]


def test_a_function_has_one_name_in_attributes():
    def keeps_all(call):
        return True

    first, second = as_attribute(keeps_all), as_attribute(lambda call: True)
    assert first == as_attribute(keeps_all) != second
    assert from_attribute(first) is keeps_all


def test_symbolic_extents_have_bounds():
    step = steps("auto", with_symbolic_batch)
    with pytest.raises(ValueError, match="the upper bound of n is missing"):
        memory_of(step)
    small, large = (memory_of(step, extents={"n": n}) for n in (8, 800))
    assert large.batch == 100 * small.batch == 4 * 800 * WIDTH
    assert large.intermediate > 20 * small.intermediate > 0
    with pytest.raises(ValueError, match="extents: the bound of n must be"):
        memory_of(step, extents={"n": -1})
    with pytest.raises(ValueError, match="a budget needs constant extents"):
        steps(1 << 20, with_symbolic_batch)


def test_other_devices_have_no_plan():
    with pytest.raises(ValueError, match="target must be a CPU or of the kind cuda"):
        planned(steps(None).module, "step", tvm.target.Target("opencl"), {})


class TestOfTorch:
    """Networks with dropout and running statistics, and with attention."""

    def _check(self, network, inputs, targets, settings):
        from torch.nn import functional as F

        from relax_grad.frontend.torch import from_module

        def loss(outputs, wanted):
            return F.cross_entropy(outputs.flatten(0, -2), wanted.flatten())

        imported = from_module(network, inputs, loss=loss, targets=targets)
        batch = [value.numpy() for value in (*inputs, *targets)]
        plain = train_step(imported, AdamW(0.01), clip_norm=1.0)
        wanted, whole = trained(plain, [batch] * 3), memory_of(plain).peak
        for remat in settings:
            step = train_step(imported, AdamW(0.01), clip_norm=1.0, remat=remat)
            assert memory_of(step).peak < whole
            assert trained(step, [batch] * 3) == wanted

    @pytest.mark.slow
    def test_convolutions(self, torch):
        torch.manual_seed(0)
        nn = torch.nn
        network = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Conv2d(16, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(16, 5),
        )
        images, labels = torch.randn(8, 3, 24, 24), torch.randint(0, 5, (8,))
        self._check(network, (images,), (labels,), ["auto", "light", "dots_saveable"])

    @pytest.mark.slow
    def test_attention(self, torch):
        torch.manual_seed(0)
        nn = torch.nn

        class Decoder(nn.Module):
            def __init__(self):
                super().__init__()
                self.words, self.head = nn.Embedding(20, 16), nn.Linear(16, 20)
                layer = nn.TransformerEncoderLayer(16, 2, 64, 0.1, "gelu", batch_first=True)
                self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

            def forward(self, tokens):
                return self.head(self.layers(self.words(tokens)))

        tokens = torch.randint(0, 20, (4, 24))
        self._check(Decoder(), (tokens,), (tokens,), ["auto", "dots_with_no_batch_dims_saveable"])
