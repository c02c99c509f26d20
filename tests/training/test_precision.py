"""Training steps whose products have a half precision."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from programs import tensor
from tvm import relax
from tvm.relax import op

from relax_grad.training import SGD, AdamW, Trainer, lora, train_step

torch = pytest.importorskip("torch")

from relax_grad.frontend.torch import from_exported_program, from_module  # noqa: E402

nn = torch.nn
ROWS, CLASSES = 8, 5
cross_entropy = nn.functional.cross_entropy


class Network(nn.Module):
    """A convolution, normalisations and products with a bias."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.mixed = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU())
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x))).mean((2, 3))
        return self.head(self.mixed(x))


def perceptron():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, CLASSES))


class Attention(nn.Module):
    """An attention, whose kernels take long to compile."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0].square().mean()


class Autocast(nn.Module):
    """A module, and its loss, within torch.autocast."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x, target):
        with torch.autocast("cpu", torch.bfloat16):
            output = self.module(x)
            loss = cross_entropy(output, target)
        return loss.float(), output.float()


def made():
    torch.manual_seed(0)
    return Network()


def data(count=ROWS):
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, 3, 5, 5, generator=generator), torch.arange(count) % CLASSES


@pytest.fixture(scope="module")
def imported():
    x, y = data()
    return from_module(made(), (x,), loss=cross_entropy, targets=(y,))


def rows(count=ROWS):
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, 6, generator=generator), torch.arange(count) % CLASSES


@pytest.fixture(scope="module")
def small():
    """An import that compiles fast."""
    x, y = rows()
    return from_module(perceptron(), (x,), loss=cross_entropy, targets=(y,))


@pytest.fixture(scope="module")
def trainers(small):
    """Trainers of this import in both precisions, which have compiled their step."""
    return [Trainer(train_step(small, SGD(lr=0.1), precision=name)) for name in ("bf16", None)]


def test_an_import_has_the_dtypes_of_torch_autocast(imported):
    """The step is that of a module that enters torch.autocast itself, to the bit."""
    x, y = data()
    trainer = Trainer(train_step(imported, SGD(lr=0.1), precision="bf16"))
    own = Trainer(train_step(from_module(Autocast(made()), (x, y)), SGD(lr=0.1)))
    losses = [trainer.step(x, y).loss for _ in range(3)]
    assert losses == [own.step(x, y).loss for _ in range(3)]
    for name, value in trainer.params.items():
        assert str(value.dtype) == "float32"
        assert value.numpy().tobytes() == own.params[f"module.{name}"].numpy().tobytes()
    assert trainer.predict(x).numpy().dtype == np.float32


def test_attention_has_half_precision():
    imported = from_module(Attention(), (torch.randn(2, 4, 8),))
    text = train_step(imported, SGD(), precision="bf16").module["step"].script()
    assert 'R.Tensor((2, 4, 2, 4), dtype="bfloat16") = R.nn.attention(' in text


def test_other_numbers_of_rows(trainers):
    trainer, rest = trainers[0], rows(3)
    assert trainer.predict(rest[0]).shape == (3, CLASSES)
    assert np.isfinite(trainer.step(*rest).loss)


def _gradients(step, x, y) -> dict[str, np.ndarray]:
    """Return the gradients of a step of SGD with a rate of 1."""
    trainer = Trainer(step)
    before = {name: value.numpy().copy() for name, value in trainer.params.items()}
    trainer.step(x, y)
    return {name: before[name] - value.numpy() for name, value in trainer.params.items()}


def _in_torch(dtype=None, double=False) -> dict[str, np.ndarray]:
    module, (x, y) = made(), data()
    if double:
        module, x = module.double(), x.double()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
        loss = cross_entropy(module(x), y)
    loss.backward()
    return {name: param.grad.numpy() for name, param in module.named_parameters()}


def _error(gradients, exact) -> float:
    """Return the error of gradients as one vector."""
    own, wanted = (
        np.concatenate([values[name].ravel() for name in exact]) for values in (gradients, exact)
    )
    return float(np.linalg.norm(own - wanted) / np.linalg.norm(wanted))


def test_errors_are_as_those_of_pytorch(imported):
    x, y = data()
    exact = _in_torch(double=True)
    of_torch = _error(_in_torch("bfloat16"), exact)
    # An import without its module passes transform.Autocast, as modules of Relax do.
    for model in (imported, dataclasses.replace(imported, _again=None)):
        step = train_step(model, SGD(lr=1.0), precision="bf16")
        assert _error(_gradients(step, x, y), exact) < 1.3 * of_torch
    assert 1e-4 < of_torch < 0.1


def test_an_exported_program_and_lora(small):
    x, y = rows()

    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Linear(6, CLASSES)

        def forward(self, x, target):
            return cross_entropy(self.module(x), target)

    program = from_exported_program(torch.export.export(WithLoss(), (x, y)))
    adapted = lora(small, 2, "[03].weight")
    for model in (program, adapted):
        step = train_step(model, AdamW(lr=1e-2), precision="bf16")
        assert "bfloat16" in step.module["step"].script()
        trainer = Trainer(step)
        losses = [trainer.step(x, y).loss for _ in range(4)]
        assert losses[-1] < losses[0]


def test_changed_functions_of_an_import_stay(small):
    """The module is not imported again, which would have the functions of before."""
    model = lora(small, 2, "[03].weight").model
    step = train_step(model, AdamW(lr=1e-2), precision="bf16")
    assert list(step.params) == list(model.params) != list(small.params)
    assert "bfloat16" in step.module["step"].script()


def test_float16_with_a_scaled_loss(small, trainers):
    x, y = rows()
    step = train_step(small, SGD(lr=0.1), precision="fp16", loss_scale="dynamic")
    assert "float16" in step.module["step"].script()
    trainer = Trainer(step)
    losses = [trainer.step(x, y).loss for _ in range(4)]
    assert losses[-1] < losses[0]
    loss = trainers[1].evaluate([(x, y)], {"loss": _mean_loss})["loss"]
    assert losses[0] == pytest.approx(loss, rel=2e-3)


def _mean_loss(output, target):
    return cross_entropy(torch.from_numpy(output), torch.from_numpy(target)).item()


def test_a_state_goes_on_in_another_precision(trainers, tmp_path):
    half, single = trainers
    x, y = rows()
    half.step(x, y)
    half.save(tmp_path / "state.safetensors")
    single.load(tmp_path / "state.safetensors")
    assert single.step(x, y).loss == pytest.approx(half.step(x, y).loss, rel=1e-2)


def test_an_onnx_import(tmp_path):
    pytest.importorskip("onnx", reason="the package onnx is not installed: extra onnx")
    from onnx_models import model_of, node

    from relax_grad.frontend.onnx import from_model

    rng = np.random.default_rng(0)
    weights = {
        "w": rng.normal(size=(6, 16)).astype("float32") / 3,
        "b": rng.normal(size=16).astype("float32"),
        "v": rng.normal(size=(16, 1)).astype("float32") / 4,
    }
    nodes = [
        node("MatMul", ["x", "w"], ["h"]),
        node("Add", ["h", "b"], ["biased"]),
        node("Relu", ["biased"], ["r"]),
        node("MatMul", ["r", "v"], ["y"]),
    ]
    model = model_of(nodes, {"x": (4, 6)}, weights)
    imported = from_model(model)
    x = rng.normal(size=(4, 6)).astype("float32")
    target = x[:, :1].copy()

    def mean_square(bb, y, target):
        return op.mean(bb.emit(op.square(bb.emit(op.subtract(y, target)))))

    def step(**options):
        types = {"target": ((4, 1), "float32")}
        return train_step(imported, SGD(lr=0.1), loss=mean_square, targets=types, **options)

    half, single = Trainer(step(precision="bf16")), Trainer(step())
    for _ in range(4):
        loss, other = half.step(x, target).loss, single.step(x, target).loss
        assert loss == pytest.approx(other, rel=0.03)
        assert loss != other
    assert half.predict(x[:1]).numpy().dtype == np.float32
    losses = [trainer.evaluate([(x, target)])["loss"] for trainer in (half, single)]
    assert losses[0] == pytest.approx(losses[1], rel=0.03)
    assert losses[0] != losses[1]


def test_a_function_of_relax():
    x, w = tensor("x", (4, 6), "float32"), tensor("w", (6,), "float32")
    bb = relax.BlockBuilder()
    with bb.function("loss", [x, w]):
        y = bb.emit(op.matmul(x, w))
        bb.emit_func_output(bb.emit(op.mean(bb.emit(op.square(y)))))
    step = train_step(bb.get(), SGD(lr=0.1), wrt="w", precision="bf16")
    trainer = Trainer(step, values={"w": np.ones(6, "float32")})
    assert trainer.step(np.ones((4, 6), "float32") * 1.001).loss == 36
    assert trainer.params["w"].numpy().dtype == np.float32


@pytest.mark.parametrize("precision", ["bfloat16", "half", "32", 16, True])
def test_other_precisions_are_refused(small, precision):
    with pytest.raises(ValueError, match='precision must be "bf16", "fp16" or None, but it is'):
        train_step(small, SGD(), precision=precision)
