"""Frozen weights of 8 and 4 bits: their rounding, steps of adapters on them, and the weights that
stay as they are."""

from __future__ import annotations

import shutil
import subprocess

import numpy as np
import pytest
import tvm
from machines import of_halves
from tvm import relax
from tvm.relax import op

from relax_grad.training import SGD, AdamW, Trainer, _files, lora, memory_of, train_step
from relax_grad.training._quantized import dequantized, quantized

FORMS = {"int8": 8, "int4": 4}


def arrays(tensors):
    return {name: tensor.numpy() for name, tensor in tensors.items()}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("bits", [8, 4])
def test_rounding(bits, dtype):
    """No element is off by more than half a step, but those of the other sign that 4 bits clip,
    which are off by one."""
    rng = np.random.default_rng(bits)
    for outputs, inputs, size in ((5, 70, 32), (3, 16, 16), (1, 1, 48)):
        matrix = (rng.normal(size=(outputs, inputs)) * rng.uniform(0, 9, (outputs, 1))).astype(
            dtype
        )
        matrix[0, : size // 2] = 0
        numbers, scale = quantized(matrix, bits, size)
        groups = -(-inputs // size)
        assert numbers.shape == (outputs, groups, size * bits // 8)
        assert scale.dtype == dtype
        weights = dequantized(numbers, scale)
        assert not weights[:, inputs:].any()
        steps = np.abs(np.repeat(scale, size, 1))[:, :inputs]
        error = np.abs(weights[:, :inputs] - matrix)
        assert (error <= steps * (0.5 if bits == 8 else 1) * (1 + 1e-5)).all()
        largest = np.abs(matrix) == np.abs(matrix).max(1, keepdims=True)
        np.testing.assert_allclose(weights[:, :inputs][largest], matrix[largest], 1e-6)
    numbers, scale = quantized(np.zeros((2, 16), dtype), bits, 16)
    assert not dequantized(numbers, scale).any()


def network(dtype="float32", batch=None):
    """Return ``loss(rows, u, t, w, b, v, c)`` as a module, and its weights.

    u is a table, t a matrix of shape (inputs, outputs), w one of (outputs, inputs), and v one that
    is also added.
    """
    rng = np.random.default_rng(0)
    shapes = {"u": (9, 64), "t": (64, 48), "w": (40, 48), "b": (40,), "v": (40, 40), "c": (2, 1, 3)}
    values = {name: (0.3 * rng.normal(size=shape)).astype(dtype) for name, shape in shapes.items()}
    n = tvm.tirx.Var("n", "int64") if batch is None else batch
    rows = relax.Var("rows", relax.TensorType((n,), "int64"))
    weights = [relax.Var(name, relax.TensorType(s, dtype)) for name, s in shapes.items()]
    u, t, w, b, v, c = weights
    bb = relax.BlockBuilder()
    with bb.function("loss", [rows, *weights]):
        with bb.dataflow():
            x = bb.emit(op.take(u, rows, 0))
            x = bb.emit(op.tanh(bb.emit(op.matmul(x, t))))
            x = bb.emit(op.matmul(x, bb.emit(op.permute_dims(w, [1, 0]))))
            x = bb.emit(op.tanh(bb.emit(op.add(x, b))))
            x = bb.emit(op.matmul(x, bb.emit(op.add(v, v))))
            x = bb.emit(op.nn.conv1d(bb.emit(op.expand_dims(x, 1)), c))
            loss = bb.emit_output(
                op.mean(op.square(bb.emit(op.subtract(x, relax.const(1, dtype)))))
            )
        bb.emit_func_output(loss)
    return bb.get(), values


ROWS = np.array([0, 3, 8, 3, 5])


def reference(values, scale, params):
    """Return the loss with adapters of t and w."""
    t = values["t"] + scale * (params["t.lora_B"] @ params["t.lora_A"]).T
    w = values["w"] + scale * params["w.lora_B"] @ params["w.lora_A"]
    x = np.tanh(np.tanh(values["u"][ROWS] @ t) @ w.T + values["b"]) @ (2 * values["v"])
    kernel = values["c"][:, 0]
    result = sum(kernel[:, i][None, :, None] * x[:, None, i : i + 38] for i in range(3))
    return np.mean((result - 1) ** 2)


@pytest.mark.parametrize("form", FORMS)
def test_steps_are_those_of_the_rounded_weights(form):
    """The loss and the gradients of adapters in float64, against NumPy and finite differences."""
    module, values = network("float64")
    adapted = lora(module, 2, ["t", "w"], alpha=3.0, values=values, frozen=form)
    rounded = arrays(adapted.merged())
    assert list(rounded) == list(values)
    for name, value in rounded.items():
        assert value.shape == values[name].shape
        assert value.dtype == np.float64
        error = np.abs(value - values[name]).max()
        assert 0 < error < 0.15 if name in "tw" else error == 0
    rng = np.random.default_rng(1)
    start = {name: rng.normal(size=tuple(param.shape)) for name, param in adapted.params.items()}
    trainer = Trainer(train_step(adapted, SGD(0.01)), values=start)
    np.testing.assert_allclose(trainer.step(ROWS).loss, reference(rounded, 1.5, start))
    for name, value in start.items():
        slope = (value - trainer.params[name].numpy()) / 0.01
        direction = rng.normal(size=value.shape)
        ahead, back = (
            reference(rounded, 1.5, {**start, name: value + step * direction})
            for step in (1e-6, -1e-6)
        )
        np.testing.assert_allclose(np.sum(slope * direction), (ahead - back) / 2e-6, rtol=1e-5)


@pytest.mark.slow
def test_adapters_learn_in_half_precision():
    """Products of frozen weights read data of bfloat16, and float32 scales, here in tiles (AMX)."""
    (module, values), target = network(), of_halves("amx")
    adapted = lora(module, 4, ["t", "w"], values=values, frozen="int8")
    last = {}
    for precision in (None, "bf16"):
        step = train_step(adapted, AdamW(lr=0.01), precision=precision)
        trainer = Trainer(step, target=target)
        losses = [trainer.step(ROWS).loss for _ in range(40)]
        assert losses[-1] < 0.8 * losses[0]
        last[precision] = losses[-1]
    assert last["bf16"] != last[None]
    assert last["bf16"] == pytest.approx(last[None], rel=0.01)


def test_adapters_learn_as_on_float32_in_less_memory(tmp_path):
    """The loss within a hundredth; a symbolic batch; steps after a checkpoint have the same
    bits."""
    module, values = network()
    losses, frozen = {}, {}
    plain = train_step(module, SGD(), wrt=list(values))
    for form in (None, *FORMS):
        adapted = lora(module, 4, ["t", "w"], values=values, frozen=form)
        step = train_step(adapted, AdamW(lr=0.01))
        trainer = Trainer(step)
        losses[form] = [trainer.step(ROWS).loss for _ in range(40)][-1]
        frozen[form] = memory_of(step, extents={"n": 5}).frozen
        merged = Trainer(plain, values=adapted.merged(trainer.params)).step(ROWS).loss
        np.testing.assert_allclose(merged, trainer.step(ROWS).loss, 1e-4)
    rest = 4 * (9 * 64 + 40 + 40 * 40 + 6)
    assert frozen[None] == rest + 4 * (64 * 48 + 40 * 48)
    assert frozen["int8"] == rest + (2 * 48 + 2 * 40) * (32 + 4)
    assert frozen["int4"] == rest + (2 * 48 + 2 * 40) * (16 + 4)
    for form in FORMS:
        assert abs(losses[form] / losses[None] - 1) < 0.01, losses
    trainer.save(tmp_path / "state")
    wanted = [trainer.step(ROWS).loss for _ in range(3)]
    again = Trainer(step)
    again.load(tmp_path / "state")
    assert [again.step(ROWS).loss for _ in range(3)] == wanted


def test_other_weights_stay_as_they_are():
    module, values = network()
    adapted = lora(module, 2, "t", values=values, frozen="int4", group_size=64)
    assert [weight.weight for weight in adapted.quantized] == ["t", "w"]
    (t, w) = adapted.quantized
    assert t.transposed
    assert not w.transposed
    assert w.bits == 4
    assert w.shape == (40, 48)
    tensors = arrays(adapted.base)
    assert list(tensors) == ["u", "t.int4", "t.scale", "w.int4", "w.scale", "b", "v", "c"]
    # The last group of an output of w has 48 of 64 elements.
    assert tensors["w.int4"].shape == (40, 1, 32)
    assert tensors["w.scale"].shape == (40, 1)
    text = {
        "u": "take reads it",
        "b": "add reads it",
        "v": "add reads it",
        "c": "nn.conv1d reads it",
    }
    assert {name: reason.partition(";")[0] for name, reason in adapted.kept.items()} == text
    script = adapted.model["loss"].script()
    assert script.count("R.grad.quantized_matmul(") == 2
    assert "permute_dims(w" not in script
    assert lora(module, 2, "t", values=values).kept == {}


def small(dtype="float32", inputs=64):
    """Return ``loss(x, w)`` of one product, and w."""
    x = relax.Var("x", relax.TensorType((3, inputs), "float32"))
    w = relax.Var("w", relax.TensorType((inputs, 5), dtype))
    bb = relax.BlockBuilder()
    with bb.function("loss", [x, w]):
        with bb.dataflow():
            wide = bb.emit(op.astype(w, "float32"))
            loss = bb.emit_output(op.sum(op.matmul(x, wide)))
        bb.emit_func_output(loss)
    return bb.get(), {"w": np.linspace(-1, 1, 5 * inputs, dtype=dtype).reshape(inputs, 5)}


def test_weights_in_half_precision():
    module, values = small("float16")
    adapted = lora(module, 2, "w", values=values, frozen="int8")
    assert {name: str(weight.dtype) for name, weight in adapted.base.items()} == {
        "w.int8": "int8",
        "w.scale": "float32",
    }
    merged = adapted.merged()["w"].numpy()
    assert merged.dtype == np.float16
    assert np.abs(merged - values["w"]).max() < 0.006
    x = np.random.default_rng(0).normal(size=(3, 64)).astype("float32")
    loss = Trainer(train_step(adapted, SGD())).step(x).loss
    np.testing.assert_allclose(loss, (x @ merged.astype("float32")).sum(), 1e-2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"frozen": "int3"}, 'frozen must be None, "int8" or "int4", but it is \'int3\''),
        ({"frozen": 8}, 'frozen must be None, "int8" or "int4", but it is 8'),
        ({"group_size": 24}, "group_size must be a multiple of 16, but it is 24"),
        ({"group_size": 0}, "group_size must be an integer from 16, but it is 0"),
        (
            {"values": {"w": np.full((64, 5), np.inf, "float32")}},
            "w has elements that are not finite",
        ),
        (
            {"group_size": 512},
            r"no weight can be stored in 8 bits \(w: groups of 512 would take no less memory "
            r"than its 64 inputs\)",
        ),
    ],
)
def test_arguments(change, message):
    module, values = small()
    arguments = {"values": values, "frozen": "int8", **change}
    with pytest.raises(ValueError, match=message):
        lora(module, 2, "w", **arguments)


def test_frozen_weights_do_not_train():
    module, values = small()
    adapted = lora(module, 2, "w", values=values, frozen="int8")
    with pytest.raises(
        ValueError, match="a model with adapters trains the parameters of the adapters"
    ):
        train_step(adapted, SGD(), wrt="w")
    with pytest.raises(TypeError, match=r"w\.int8 must be a floating-point tensor"):
        train_step(adapted.model, SGD(), wrt="w.int8")


@pytest.mark.skipif(
    shutil.which("cmake") is None or shutil.which("g++") is None,
    reason="the C++ trainer is built with CMake and g++",
)
def test_same_bits_in_a_program_without_python(programs, tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy", reason="states are such files")
    module, values = network(batch=5)
    adapted = lora(module, 2, ["t", "w"], values=values, frozen="int4")
    step = train_step(adapted, AdamW(lr=0.01))
    step.export(tmp_path / "exported")
    rows = np.random.default_rng(0).integers(0, 9, (3, 5))
    safetensors.save_file({"rows": rows.reshape(-1)}, tmp_path / "data")
    trainer = Trainer(step)
    trainer.fit([(row,) for row in rows], 2, progress=False)
    options = ["--epochs", "2", "--batch", "5", "--save", tmp_path / "there"]
    command = [programs / "train", tmp_path / "exported", tmp_path / "data", *options]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    trainer.save(tmp_path / "here")
    (here, _), (there, _) = (_files.read(tmp_path / name) for name in ("here", "there"))
    assert set(here) == set(there)
    for name, value in here.items():
        assert str(value.dtype) == str(there[name].dtype)
        assert value.tobytes() == there[name].tobytes(), name
    assert "uint8" in {str(tensor.dtype) for tensor in here.values()}
