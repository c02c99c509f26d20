"""Operators of ONNX whose converters are this package's: values by ONNX's evaluator, gradients by
differences."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

import relax_grad

onnx = pytest.importorskip("onnx", reason="the package onnx is not installed: extra onnx")

import onnx_models as models  # noqa: E402
from onnx_models import node, normal  # noqa: E402

from relax_grad.frontend.onnx import from_model  # noqa: E402
from relax_grad.frontend.onnx.graph.expand import expand  # noqa: E402

OPERATORS = {
    "avg_pool_same": (node("AveragePool", ["x"], kernel_shape=[3, 2], auto_pad="SAME_LOWER",
    strides=[2, 1]), {}),
    "celu_free": (node("Selu", ["x"]), {}),
    "clip_high": (node("Clip", ["x", "", "high"]), {"high": np.array(0.5)}),
    "conv_same_lower": (
        node("Conv", ["x", "w"], auto_pad="SAME_LOWER", strides=[2, 2]),
        {"w": normal(3, 2, 3, 2, dtype="float64")},
    ),
    "conv_transpose_shape": (
        node("ConvTranspose", ["x", "w"], output_shape=[8, 11], strides=[2, 2]),
        {"w": normal(2, 3, 3, 3, dtype="float64")},
    ),
    "cumsum": (node("CumSum", ["x", "axis"], reverse=1, exclusive=1), {"axis": np.array(2)}),
    "einsum": (node("Einsum", ["x", "w"], equation="nchw, wd -> nchd"),
    {"w": normal(5, 3, dtype="float64")}),
    "elu": (node("Elu", ["x"], alpha=0.7), {}),
    "gelu_free": (node("Mish", ["x"]), {}),
    "layer_norm": (
        node("LayerNormalization", ["x", "w"], axis=2),
        {"w": normal(4, 5, dtype="float64")},
    ),
    "max": (node("Max", ["x", "w", "v"]),
    {"w": normal(5, dtype="float64"), "v": normal(4, 1, dtype="float64")}),
    "max_pool_same": (node("MaxPool", ["x"], kernel_shape=[3, 2], auto_pad="SAME_LOWER",
    strides=[2, 2]), {}),
    "mean": (node("Mean", ["x", "w"]), {"w": normal(5, dtype="float64")}),
    "pad_edge": (node("Pad", ["x", "pads"], mode="edge"),
    {"pads": np.array([0, 0, 1, 2, 0, 0, 3, 0])}),
    "pad_negative": (node("Pad", ["x", "pads", "value"]),
    {"pads": np.array([0, 0, -1, 2, 0, 0, 1, -2]), "value": np.array(0.5)}),
    "pad_axes": (node("Pad", ["x", "pads", "", "axes"]),
    {"pads": np.array([1, 2]), "axes": np.array([-1])}),
    "pow": (node("Pow", ["x", "two"]), {"two": np.array(2)}),
    "resize_sizes": (
        node("Resize", ["x", "", "", "sizes"], mode="nearest",
            coordinate_transformation_mode="asymmetric", nearest_mode="floor"),
        {"sizes": np.array([1, 2, 6, 7])},
    ),
    "resize_axes": (node("Resize", ["x", "", "scales"], axes=[3], mode="linear"),
    {"scales": np.array([3], "float32")}),
    "slice": (node("Slice", ["x", "a", "b", "c", "d"]),
    {"a": np.array([-1, 1]), "b": np.array([-9, 2**31 - 1]), "c": np.array([2, 3]),
        "d": np.array([-2, 1])}),
    "thresholded_relu": (node("ThresholdedRelu", ["x"], alpha=0.3), {}),
    "tile": (node("Tile", ["x", "repeats"]), {"repeats": np.array([1, 2, 1, 2])}),
}  # fmt: skip


#: Some version of ONNX's evaluator refuses these, or returns another shape than the specification
#: and onnxruntime.
WITHOUT_EVALUATOR = {"conv_same_lower", "conv_transpose_shape", "max_pool_same", "pad_negative"}


def after_product(case, dtype):
    """Return a model of an operator on the product of an input and a weight, and the input's
    value."""
    operator, weights = OPERATORS[case]
    weights = {
        name: value.astype(dtype) if value.dtype == "float64" else value
        for name, value in weights.items()
    }
    model = models.model_of(
        [node("Mul", ["z", "factor"], ["x"]), operator],
        {"z": [1, 2, 4, 5]},
        {**weights, "factor": normal(1, 2, 4, 5, dtype=dtype)},
        dtype=dtype,
        opset=22 if operator.op_type == "Mish" else models.OPSET,
    )
    return model, {"z": normal(1, 2, 4, 5, dtype=dtype)}


@pytest.mark.parametrize("case", OPERATORS)
def test_an_operator_has_onnx_values_and_gradients(case):
    model, feeds = after_product(case, "float64")
    imported = from_model(model)
    assert "call_tir" not in imported.module["main"].script()
    if case not in WITHOUT_EVALUATOR:
        models.check_outputs(imported, model, feeds)
    models.check_parameter_gradients(imported, feeds)


@pytest.mark.parametrize("case", OPERATORS)
def test_an_operator_has_the_values_of_onnxruntime(case):
    reason = "onnxruntime is not installed, with which values are compared"
    runtime = pytest.importorskip("onnxruntime", reason=reason)
    model, feeds = after_product(case, "float32")
    session = runtime.InferenceSession(model.SerializeToString())
    (expected,) = session.run(None, feeds)
    (result,) = models.outputs(from_model(model), feeds)
    assert result.shape == expected.shape
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)


def without_definitions() -> bool:
    """Tell whether the package is too old to write operators by their definitions."""
    inline = pytest.importorskip("onnx.inliner").inline_selected_functions
    return "inline_schema_functions" not in inspect.signature(inline).parameters


#: Operators without a converter that ONNX defines by others, with the version of ONNX's operators.
DEFINED = {
    "celu": (28, [node("Celu", ["a"], alpha=0.5)]),
    "swish": (24, [node("Swish", ["a"], alpha=1.5)]),
    "attention": (
        23,
        [
            node(
                "Attention",
                ["a", "a", "a"],
                q_num_heads=2,
                kv_num_heads=2,
                is_causal=1,
                softcap=2.0,
            )
        ],
    ),
    "nested": (22, [node("SoftmaxCrossEntropyLoss", ["a", "labels"], ignore_index=1)]),
}


@pytest.mark.skipif(
    without_definitions(), reason="this version of onnx writes no operator by others"
)
@pytest.mark.parametrize("case", DEFINED)
def test_an_operator_that_onnx_defines_by_others(case):
    version, nodes = DEFINED[case]
    if version > onnx.defs.onnx_opset_version():
        pytest.skip(f"this version of onnx does not have version {version} of the operators")
    nodes = [node("MatMul", ["x", "w"], ["a"]), *nodes]
    weights = {"w": normal(4, 4, dtype="float64")}
    if case == "nested":
        weights["labels"] = np.array([[1, 0, 2, 2]] * 2)
    model = models.model_of(nodes, {"x": [2, 3, 4]}, weights, dtype="float64", opset=version)
    feeds = {"x": normal(2, 3, 4, dtype="float64")}
    imported = from_model(model)
    models.check_outputs(imported, model, feeds)
    models.check_parameter_gradients(imported, feeds)


@pytest.mark.skipif(
    without_definitions(), reason="this version of onnx writes no operator by others"
)
def test_an_operator_whose_definition_cannot_be_imported_is_left():
    model = models.model_of([node("Celu", ["x"], name="curve")], {"x": [3]}, {})
    (left,) = expand(model, lambda proto: False).graph.node
    assert (left.op_type, left.name) == ("Celu", "curve")
    assert "Celu" not in {
        written.op_type
        for written in expand(model, lambda proto: proto.op_type != "Celu").graph.node
    }


@pytest.mark.parametrize("kind", ["Celu", "Elu", "Selu", "Mish", "Softplus"])
def test_gradients_of_large_values_are_finite(kind):
    opset = 22 if kind == "Mish" else models.OPSET
    model = models.model_of(
        [node("Mul", ["z", "w"], ["x"]), node(kind, ["x"])],
        {"z": [3]},
        {"w": np.ones(3, "float32")},
        opset=opset,
    )
    imported = from_model(model)
    module = relax_grad.value_and_grad(imported.with_loss(models.weighted_sum), "loss", wrt="w")
    z = np.array([-500, 0.5, 500], "float32")
    _, (gradient,) = models.compiled(module, "loss_adjoint")(z, *imported.values)
    assert np.isfinite(gradient).all()


def test_a_vector_of_zeros_is_normalised_to_zeros():
    nodes = [node("Mul", ["z", "w"], ["x"]), node("LpNormalization", ["x"])]
    model = models.model_of(nodes, {"z": [2, 3]}, {"w": np.ones(3, "float32")})
    imported = from_model(model)
    module = relax_grad.value_and_grad(imported.with_loss(models.weighted_sum), "loss", wrt="w")
    z = np.array([[0, 0, 0], [3, 0, 4]], "float32")
    call = models.compiled(module, None)
    np.testing.assert_allclose(call("main", z, *imported.values), [[0, 0, 0], [0.6, 0, 0.8]])
    _, (gradient,) = call("loss_adjoint", z, *imported.values)
    assert np.isfinite(gradient).all()


def test_advice_about_shapes_is_given_where_they_are_the_cause():
    """A node with constant shapes that cannot be imported has its operands in the message."""
    bad = models.model_of([node("MatMul", ["x", "w"])], {"x": [2, 5]}, {"w": normal(3, 4)})
    with pytest.raises(ValueError, match="MatMul") as error:
        from_model(bad)
    assert "shapes={" not in str(error.value)
    assert "simplify" not in str(error.value)
