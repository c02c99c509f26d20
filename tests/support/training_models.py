"""A small module that training tests share, with its loss and gradients in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.relax import op

SHAPES = {"x": (6, 3), "y": (6,), "w": (3,), "b": ()}


def module_of(dtype="float64", *, seed=False, states=False) -> tvm.IRModule:
    """Return ``loss(x, y, w, b)``, the mean squared error of a linear function, as float32 for half
    precision."""
    variables = {name: relax.Var(name, relax.TensorType(s, dtype)) for name, s in SHAPES.items()}
    x, y, w, b = variables.values()
    params = list(variables.values())
    mean = relax.Var("mean", relax.TensorType((3,), dtype))
    params += [mean] if states else []
    number = relax.Var("seed", relax.TensorType((), "int64"))
    params += [number] if seed else []
    bb = relax.BlockBuilder()
    with bb.function("loss", params):
        with bb.dataflow():
            difference = bb.emit(op.subtract(op.add(op.matmul(x, w), b), y))
            if seed:
                difference = bb.emit(op.add(difference, op.astype(number, dtype)))
            loss = bb.emit(op.mean(op.multiply(difference, difference)))
            result = loss
            if states:
                new = op.add(op.multiply(mean, relax.const(0.5, dtype)), op.mean(x, 0))
                result = relax.Tuple([loss, difference, bb.emit(new)])
            result = bb.emit_output(result)
        bb.emit_func_output(result)
    return bb.get()


#: The columns of the batch of ``symbolic``, and the most rows.
WIDTH, MOST = 256, 2000


def symbolic() -> tvm.IRModule:
    """Return ``loss(x, w)`` of a network whose activations are large, with a symbolic number of
    rows."""
    n = tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorType((n, WIDTH), "float32"))
    w = relax.Var("w", relax.TensorType((WIDTH, WIDTH), "float32"))
    bb = relax.BlockBuilder()
    with bb.function("loss", [x, w]):
        with bb.dataflow():
            y = x
            for _ in range(3):
                y = bb.emit(op.tanh(bb.emit(op.matmul(y, w))))
            loss = bb.emit_output(op.mean(op.square(y)))
        bb.emit_func_output(loss)
    return bb.get()


def batches(count: int, dtype="float64"):
    rng = np.random.default_rng(3)
    return [
        (rng.normal(size=SHAPES["x"]).astype(dtype), rng.normal(size=SHAPES["y"]).astype(dtype))
        for _ in range(count)
    ]


START = {"w": np.array([0.5, -1.0, 2.0]), "b": np.array(0.25)}


def gradients(values, batch) -> tuple[float, dict[str, np.ndarray]]:
    x, y = batch
    difference = x @ values["w"] + values["b"] - y
    scaled = 2 * difference / len(y)
    return float(np.mean(difference**2)), {"w": x.T @ scaled, "b": np.sum(scaled)}


def close(actual, wanted, tolerance=1e-12):
    for name, value in wanted.items():
        np.testing.assert_allclose(
            np.asarray(actual[name].numpy(), "float64"), value, tolerance, tolerance, err_msg=name
        )


def digits_of_torch():
    """Return an imported CNN with batch normalisation and dropout, and scikit-learn's digits:
    images and labels."""
    torch = pytest.importorskip("torch", reason="the package torch is not installed: extra torch")
    datasets = pytest.importorskip("sklearn.datasets", reason="the digits come with scikit-learn")
    from relax_grad.frontend.torch import from_module

    digits = datasets.load_digits()
    images = (digits.images[:, None] / 16).astype("float32")
    labels = digits.target.astype("int64")
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        # Batch normalisation takes a bias away: its gradient is rounding errors, whose signs AdamW
        # would follow.
        torch.nn.Conv2d(1, 8, 3, padding=1, bias=False),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Dropout(0.1),
        torch.nn.Linear(128, 10),
    )
    imported = from_module(
        network,
        (torch.from_numpy(images[:64]),),
        loss=torch.nn.functional.cross_entropy,
        targets=(torch.from_numpy(labels[:64]),),
        dynamic_shapes={"input": {0: "batch"}, "target": {0: "batch"}},
    )
    return imported, images, labels


def tensors(trainer) -> dict[str, bytes]:
    """Return the bits of the values and of the optimizer's state."""
    return {
        k: v.numpy().tobytes() for k, v in {**trainer.values, **trainer.optimizer_state}.items()
    }
