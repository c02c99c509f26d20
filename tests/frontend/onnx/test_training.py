"""Training of imported ONNX models: the states of normalisations, and losses."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

import relax_grad

onnx = pytest.importorskip("onnx", reason="the package onnx is not installed: extra onnx")

import onnx_models as models  # noqa: E402
from onnx import TensorProto, helper  # noqa: E402
from onnx_models import WEIGHTS, classifier, node, normal  # noqa: E402

from relax_grad.frontend.onnx import from_model  # noqa: E402


def normalization(training, momentum=0.7, dtype="float64"):
    attributes = {"training_mode": 1} if training else {}
    nodes = [
        node(
            "BatchNormalization",
            ["x", "g", "b", "mean", "var"],
            ["a", "new", ""][: 1 + training],
            momentum=momentum,
            epsilon=0.01,
            **attributes,
        ),
        node("Mul", ["a", "w"]),
    ]
    weights = {
        "g": normal(3),
        "b": normal(3),
        "mean": normal(3),
        "var": 1 + normal(3) ** 2,
        "w": normal(1),
    }
    weights = {name: value.astype(dtype) for name, value in weights.items()}
    return models.model_of(nodes, {"x": [4, 3, 5]}, weights, dtype=dtype)


def test_training_normalisation_returns_its_states():
    model, x = normalization(True), normal(4, 3, 5, dtype="float64")
    imported = from_model(model)
    assert list(imported.states) == ["mean", "var"]
    assert list(imported.outputs) == ["y"]
    found = models.outputs(imported, {"x": x})
    model.graph.node[0].output[:] = ["a", "new_mean", "new_var"]
    for name in ("new_mean", "new_var"):
        model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.DOUBLE, [3]))
    for one, expected in zip(found, models.wanted(model, {"x": x}), strict=True):
        np.testing.assert_allclose(one, expected, rtol=1e-6)
    old, mean = imported.states["mean"].numpy(), x.mean((0, 2))
    np.testing.assert_allclose(found[1], 0.7 * old + 0.3 * mean, rtol=1e-6)
    models.check_parameter_gradients(imported, {"x": x})


def test_states_of_the_old_form_of_training():
    model, x = normalization(False, dtype="float32"), normal(4, 3, 5)
    model.graph.node[0].output.extend(["m", "v", "saved_m", "saved_v"])
    model.opset_import[0].version = 9
    imported = from_model(model)
    assert list(imported.states) == ["mean", "var"]
    _, new_mean, _ = models.outputs(imported, {"x": x})
    expected = 0.7 * imported.states["mean"].numpy() + 0.3 * x.mean((0, 2))
    np.testing.assert_allclose(new_mean, expected, rtol=1e-5)


def test_a_state_of_two_normalisations_is_refused():
    model = normalization(True)
    second = node("BatchNormalization", ["y", "g", "b", "mean", "var"], ["z"], training_mode=1)
    model.graph.node.append(second)
    model.graph.output[0].name = "z"
    with pytest.raises(ValueError, match="two normalisations update the running statistic mean"):
        from_model(model)


def mean_square(bb, y, target):
    error = bb.emit(relax.op.subtract(y, target))
    return bb.emit(relax.op.mean(relax.op.multiply(error, error)))


def test_a_loss_with_targets():
    imported = from_model(classifier(batch="batch"))
    module = imported.with_loss(mean_square, {"target": (("batch", 3), "float32")})
    loss = module["loss"]
    assert [param.name for param in loss.params] == ["x", "target", *WEIGHTS, "mean", "var"]
    assert int(loss.attrs["num_input"]) == 2
    module = relax_grad.value_and_grad(module, "loss", wrt=list(imported.params))
    run = models.compiled(module, "loss_adjoint")
    x, target = normal(2, 3, 7, 7), normal(2, 3)
    values = {name: value.numpy() for name, value in imported.params.items()}
    rest = list(imported.frozen.values())
    losses = []
    for _ in range(5):
        loss, gradients = run(x, target, *values.values(), *rest)
        losses.append(float(loss))
        for (name, value), gradient in zip(values.items(), gradients, strict=True):
            values[name] = value - 0.02 * gradient
    assert losses[-1] < losses[0]


def test_a_loss_of_a_model_with_states():
    imported = from_model(normalization(True))
    module = imported.with_loss(models.weighted_sum)
    x = normal(4, 3, 5, dtype="float64")
    loss, mean, var = models.compiled(module, "loss")(x, *imported.values)
    assert loss.shape == ()
    np.testing.assert_allclose(mean, models.outputs(imported, {"x": x})[1])
    assert var.shape == (3,)


def test_a_wrong_loss_is_refused():
    imported = from_model(classifier())
    with pytest.raises(ValueError, match="the model has a parameter 'gamma' already"):
        imported.with_loss(mean_square, {"gamma": ((2, 3), "float32")})
    with pytest.raises(
        ValueError, match="has the extent 'n', but the symbols of the model are none"
    ):
        imported.with_loss(mean_square, {"target": (("n", 3), "float32")})
    with pytest.raises(TypeError, match="loss_fn must return a Relax expression"):
        imported.with_loss(lambda bb, y: None)
