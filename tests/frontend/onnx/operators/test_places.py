"""The places of the largest elements of windows, and the return of elements to their places: values
by ONNX's evaluator and onnxruntime, gradients by differences."""

from __future__ import annotations

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="the package onnx is not installed: extra onnx")

import onnx_models as models  # noqa: E402
from onnx_models import node, normal  # noqa: E402

from relax_grad.frontend.onnx import UnsupportedOperatorError, from_model  # noqa: E402

RNG = np.random.default_rng(2)


def drawn(rank: int, **attributes) -> dict:
    """Return random windows of pictures of some axes."""
    kernel = RNG.integers(2, 4, rank)
    pads = RNG.integers(0, kernel, (2, rank)) // 2
    return {
        "kernel_shape": kernel.tolist(),
        "strides": RNG.integers(1, 3, rank).tolist(),
        "pads": pads.reshape(-1).tolist(),
        **attributes,
    }


CASES = {
    "line": drawn(1),
    "picture": drawn(2),
    "columns": drawn(2, storage_order=1),
    "dilated": drawn(2, dilations=[2, 1]),
    "last window": drawn(2, ceil_mode=1, strides=[3, 2]),
    "padded above": {"kernel_shape": [3, 2], "strides": [2, 2], "auto_pad": "SAME_LOWER"},
    "volume": drawn(3),
}


@pytest.mark.parametrize("case", CASES)
def test_places_of_the_largest_elements(case):
    reason = "onnxruntime is not installed, with which values are compared"
    runtime = pytest.importorskip("onnxruntime", reason=reason)
    attributes = CASES[case]
    shape = [2, 3, 7, 6, 5][: 2 + len(attributes["kernel_shape"])]
    pool = node("MaxPool", ["x"], ["y", "places"], **attributes)
    model = models.model_of([pool], {"x": shape}, {}, outputs=["y", "places"])
    model.graph.output[1].type.tensor_type.elem_type = onnx.TensorProto.INT64
    x = RNG.integers(-3, 4, shape).astype("float32")  # with equal elements
    results = models.outputs(from_model(model), {"x": x})
    expected = runtime.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    assert results[1].dtype == np.int64
    for result, other in zip(results, expected, strict=True):
        np.testing.assert_array_equal(result, other)


def unpooled(dtype="float64", **attributes):
    """Return a model that returns the largest elements of windows to their places."""
    nodes = [
        node("Mul", ["x", "w"], ["a"]),
        node("MaxPool", ["a"], ["largest", "places"], **attributes),
        node("Mul", ["largest", "factor"], ["b"]),
        node("MaxUnpool", ["b", "places"], **attributes),
    ]
    weights = {"w": normal(3, 1, 1, dtype=dtype), "factor": normal(1, dtype=dtype)}
    return models.model_of(nodes, {"x": [2, 3, 6, 8]}, weights, dtype=dtype)


def test_elements_return_to_their_places():
    """The network of a segmentation remembers the places of its pooling."""
    attributes = {"kernel_shape": [2, 4], "strides": [2, 2], "pads": [0, 2, 0, 0]}
    model = unpooled(**attributes)
    imported = from_model(model, trainable="*")
    x = normal(2, 3, 6, 8, dtype="float64")
    (result,) = models.outputs(imported, {"x": x})
    np.testing.assert_allclose(result, models.wanted(model, {"x": x})[0], 1e-12)
    models.check_parameter_gradients(imported, {"x": x})
    symbolic = from_model(model, shapes={"x": ("n", 3, 6, 8)})
    np.testing.assert_array_equal(models.outputs(symbolic, {"x": x})[0], result)


@pytest.mark.parametrize("bounds", [{}, {"iou": 0.3}, {"iou": 0.7, "score": 0.25}, {"score": -0.5}])
def test_boxes_that_overlap_are_left_out(bounds):
    """Bounds that are left out are those of ONNX: no overlap, and any score."""
    corners = RNG.uniform(0, 1, (2, 6, 2))
    boxes = np.concatenate([corners, corners + RNG.uniform(0.2, 0.6, (2, 6, 2))], 2)
    feeds = {"boxes": boxes, "scores": RNG.uniform(-1, 1, (2, 3, 6))}
    feeds = {name: value.astype("float32") for name, value in feeds.items()}
    weights = {name: np.array([value], "float32") for name, value in bounds.items()}
    weights["count"] = np.array([4])
    operands = ["boxes", "scores", "count", *(key if key in bounds else "" for key in ("iou",
    "score"))]  # fmt: skip
    while not operands[-1]:
        operands.pop()
    call = node("NonMaxSuppression", operands)
    shapes = {name: list(value.shape) for name, value in feeds.items()}
    model = models.model_of([call], shapes, weights)
    model.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.INT64
    reason = "onnxruntime is not installed, with which values are compared"
    runtime = pytest.importorskip("onnxruntime", reason=reason)
    (result,) = models.outputs(from_model(model), feeds)
    (expected,) = runtime.InferenceSession(model.SerializeToString()).run(None, feeds)
    np.testing.assert_array_equal(result, expected)


def test_bounds_of_overlap_that_are_computed_are_refused():
    shapes = {"boxes": [1, 6, 4], "scores": [1, 2, 6], "bound": [1]}
    call = node("NonMaxSuppression", ["boxes", "scores", "count", "bound"])
    model = models.model_of([call], shapes, {"count": np.array([4])})
    message = "its operand 'iou_threshold' is computed at run time"
    with pytest.raises(UnsupportedOperatorError, match=message):
        from_model(model)


@pytest.mark.parametrize(("kind", "offset"), [("float64", 0), ("int32", -1), ("float32", 2)])
def test_ones_on_a_diagonal_of_another_dtype(kind, offset):
    number = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(kind))
    model = models.model_of([node("EyeLike", ["x"], dtype=number, k=offset)], {"x": [3, 4]}, {})
    (result,) = models.outputs(from_model(model), {"x": normal(3, 4)})
    assert result.dtype == kind
    np.testing.assert_array_equal(result, np.eye(3, 4, offset))


@pytest.mark.parametrize(
    ("call", "shape", "message"),
    [
        (node("MaxPool", ["x"], ["y", "z"], kernel_shape=[2]), [1, 2, "n"], "give the extents"),
        (node("MaxPool", ["x"], ["y", "z"], kernel_shape=[300]), [1, 1, 400], "have 300 elements"),
        (node("MaxUnpool", ["x", "i"], kernel_shape=[2]), [1, 1, "n"], "it needs known extents"),
        (node("MaxUnpool", ["x", "i", "s"], kernel_shape=[2]), [1, 1, 2],
         r"output_shape is \[1, 1, 4\], and its windows cover \[1, 1, 3\]"),
    ],
)  # fmt: skip
def test_errors(call, shape, message):
    weights = {"i": np.array([[[0, 2]]]), "s": np.array([1, 1, 4])}
    weights = {name: value for name, value in weights.items() if name in call.input}
    with pytest.raises(UnsupportedOperatorError, match=message):
        from_model(models.model_of([call], {"x": shape}, weights, outputs=list(call.output)))
