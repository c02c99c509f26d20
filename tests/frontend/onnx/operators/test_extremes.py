"""Operators that compare elements keep NaN, in the pipelines of TVM and of this package."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax

onnx = pytest.importorskip("onnx", reason="the package onnx is not installed: extra onnx")

from onnx import TensorProto  # noqa: E402
from onnx import helper as H  # noqa: E402

import relax_grad  # noqa: E402
from relax_grad.frontend.onnx import UnsupportedOperatorError, from_model  # noqa: E402
from relax_grad.ir.extent_checks import extent_checks  # noqa: E402

NAN, INF = np.nan, np.inf
X = np.array(
    [
        [1, NAN, -1, 2],
        [0, -0.0, INF, -INF],
        [NAN, NAN, NAN, NAN],
        [3, 1, 2, NAN],
        [NAN, INF, 7, -INF],
        [-INF, -INF, -INF, -INF],
    ],
    "float32",
)
OTHER = np.roll(X, 1, 1)[::-1].copy()
PICTURE = X.reshape(1, 1, 6, 4)


def windows(data, rows):
    """Return the maxima of windows of some rows and two columns."""
    height, width = data.shape
    parts = [
        data[i : height - rows + 1 + i, j : width - 1 + j] for i in range(rows) for j in (0, 1)
    ]
    return np.max(parts, 0)


def top(data, count, largest):
    order = np.sort(data, 1)  # NaN is the last
    return order[:, ::-1][:, :count] if largest else order[:, :count]


def clip(low, high):
    return np.clip(X, low, high)


#: The nodes by their names, with the values of NumPy.
CASES = {
    "Relu": (("x",), {}, np.maximum(X, 0)),
    "Clip": (("x", "zero", "six"), {}, clip(0, 6)),
    "Clip_low": (("x", "zero"), {}, np.maximum(X, 0)),
    "Clip_high": (("x", "", "six"), {}, np.minimum(X, 6)),
    "Max": (("x", "zero"), {}, np.maximum(X, 0)),
    "Max_first": (("six", "x"), {}, np.maximum(6, X)),
    "Max_two": (("x", "y"), {}, np.maximum(X, OTHER)),
    "Max_three": (("x", "zero", "y"), {}, np.maximum(np.maximum(X, 0), OTHER)),
    "Min": (("x", "zero"), {}, np.minimum(X, 0)),
    "Min_two": (("y", "x"), {}, np.minimum(OTHER, X)),
    "HardSigmoid": (("x",), {"alpha": 0.25}, np.clip(0.25 * X + 0.5, 0, 1)),
    "Sign": (("x",), {}, np.sign(X)),
    "ReduceMax": (("x",), {"axes": [1], "keepdims": 0}, X.max(1)),
    "ReduceMax_all": (("x",), {}, X.max(keepdims=True)),
    "ReduceMin": (("x",), {"axes": [1]}, X.min(1, keepdims=True)),
    "ReduceLogSumExp": (("x",), {"axes": [1], "keepdims": 0}, np.logaddexp.reduce(X, 1)),
    "ReduceLogSumExp_all": (("infinite",), {}, np.array([[INF]], "float32")),
    "ArgMax": (("x",), {"axis": 1, "keepdims": 0}, X.argmax(1)),
    "ArgMin": (("x",), {"axis": 1}, X.argmin(1)[:, None]),
    "ArgMax_last": (
        ("x",),
        {"axis": 1, "select_last_index": 1, "keepdims": 0},
        3 - X[:, ::-1].argmax(1),
    ),
    "TopK": (("x", "two"), {"axis": 1}, top(X, 2, True)),
    "TopK_least": (("x", "two"), {"axis": 1, "largest": 0}, top(X, 2, False)),
    "Hardmax": (("x",), {"axis": 1}, np.eye(4, dtype="float32")[X.argmax(1)]),
    "MaxPool": (("picture",), {"kernel_shape": [2, 2]}, windows(X, 2)[None, None]),
    "MaxPool_three": (("picture",), {"kernel_shape": [3, 2]}, windows(X, 3)[None, None]),
    "GlobalMaxPool": (("picture",), {}, PICTURE.max((2, 3), keepdims=True)),
}


@pytest.fixture(scope="module")
def imported():
    nodes = []
    for name, (operands, attributes, _) in CASES.items():
        outputs = [name, f"{name}_places"] if name.startswith("TopK") else [name]
        nodes.append(H.make_node(name.partition("_")[0], list(operands), outputs, **attributes))
    constants = {"zero": np.float32(0), "six": np.float32(6), "two": np.array([2])}
    nodes.insert(0, H.make_node("Slice", ["x", "start", "end"], ["infinite"]))
    constants.update(start=np.array([1, 0]), end=np.array([2, 4]))
    graph = H.make_graph(
        nodes,
        "graph",
        [
            H.make_tensor_value_info(name, TensorProto.FLOAT, value.shape)
            for name, value in (("x", X), ("y", OTHER), ("picture", PICTURE))
        ],
        [
            H.make_tensor_value_info(
                name, TensorProto.INT64 if name.startswith("Arg") else TensorProto.FLOAT, None
            )
            for name in CASES
        ],
        [onnx.numpy_helper.from_array(np.asarray(v), name) for name, v in constants.items()],
    )
    return from_model(H.make_model(graph, opset_imports=[H.make_opsetid("", 17)], ir_version=8))


@pytest.mark.parametrize("pipeline", ["relax_grad", None])
def test_nan_stays(imported, pipeline):
    options = {"relax_pipeline": pipeline} if pipeline else {}
    target = relax_grad.target.host() if pipeline else "llvm"
    executable = tvm.compile(imported.module, target, **options)
    main = relax.VirtualMachine(executable, tvm.cpu())["main"]
    results = main(*map(tvm.runtime.tensor, (X, OTHER, PICTURE)), *imported.values)
    for (name, (*_, wanted)), result in zip(CASES.items(), results, strict=True):
        np.testing.assert_array_equal(result.numpy(), wanted, err_msg=name)


@pytest.mark.parametrize("pipeline", ["relax_grad", None])
def test_gradients_pass_within_bounds(pipeline):
    """Also at the bounds of Clip and HardSigmoid; Relu has none at 0, and extremes share it."""
    data = np.array([-3, -2, 0, 1, 6, 7, 7], "float32")
    nodes = [
        H.make_node("Relu", ["x"], ["a"]),
        H.make_node("Clip", ["x", "zero", "six"], ["b"]),
        H.make_node("HardSigmoid", ["x"], ["c"], alpha=0.25),
        H.make_node("Sign", ["x"], ["d"]),
        H.make_node("ReduceMax", ["x"], ["e"], keepdims=0),
        H.make_node("Max", ["x", "zero"], ["f"]),
        H.make_node("Sum", ["a", "b", "c", "d", "e", "f"], ["g"]),
        H.make_node("ReduceSum", ["g"], ["loss"], keepdims=0),
    ]
    graph = H.make_graph(
        nodes,
        "graph",
        [H.make_tensor_value_info("x", TensorProto.FLOAT, [7])],
        [H.make_tensor_value_info("loss", TensorProto.FLOAT, [])],
        [
            onnx.numpy_helper.from_array(np.float32(value), name)
            for name, value in (("zero", 0), ("six", 6))
        ],
    )
    model = H.make_model(graph, opset_imports=[H.make_opsetid("", 13)], ir_version=8)
    module = from_model(model).module
    module = relax_grad.transform.Gradient("main", module["main"].params[:1])(module)
    options = {"relax_pipeline": pipeline} if pipeline else {}
    target = relax_grad.target.host() if pipeline else "llvm"
    executable = tvm.compile(module, target, **options)
    machine = relax.VirtualMachine(executable, tvm.cpu())
    gradient = machine["main_adjoint"](tvm.runtime.tensor(data))[1][0].numpy()
    relu, inside = 1.0 * (data > 0), 1.0 * ((data >= 0) & (data <= 6))
    line = 0.25 * ((0.25 * data + 0.5 >= 0) & (0.25 * data + 0.5 <= 1))
    ties = 0.5 * (data == 7) * 7
    wanted = relu + inside + line + ties + np.where(data == 0, 0.5, relu)
    np.testing.assert_allclose(gradient, wanted)


def _model(nodes, inputs, outputs, constants=None, opset=18):
    def infos(kinds):
        return [H.make_tensor_value_info(name, *kind) for name, kind in kinds.items()]

    constants = [onnx.numpy_helper.from_array(v, name) for name, v in (constants or {}).items()]
    graph = H.make_graph(nodes, "graph", infos(inputs), infos(outputs), constants)
    return H.make_model(graph, opset_imports=[H.make_opsetid("", opset)], ir_version=8)


def _results(model, data):
    imported = from_model(model)
    executable = tvm.compile(imported.module, "llvm")
    results = relax.VirtualMachine(executable, tvm.cpu())["main"](
        tvm.runtime.tensor(data), *imported.values
    )
    return [result.numpy() for result in results]


def test_first_versions_of_clip_bound_infinities():
    nodes = [
        H.make_node("Clip", ["x"], ["low"], min=-1.0),
        H.make_node("Clip", ["x"], ["high"], max=1.0),
        H.make_node("Clip", ["x"], ["none"]),
    ]
    outputs = {name: (TensorProto.FLOAT, [6, 4]) for name in ("low", "high", "none")}
    model = _model(nodes, {"x": (TensorProto.FLOAT, [6, 4])}, outputs, opset=6)
    wanted = onnx.reference.ReferenceEvaluator(model).run(None, {"x": X})
    for result, expected in zip(_results(model, X), wanted, strict=True):
        np.testing.assert_array_equal(result, expected)


def test_reductions_over_no_axes():
    """Their functions of one element remain. The evaluator of old versions of onnx differs."""
    data = np.array([[1, 2, 3], [-1, 0, 5]], "float32")
    functions = {"L1": np.abs, "L2": np.abs, "LogSum": np.log, "SumSquare": np.square}
    functions["Mean"] = functions["LogSumExp"] = lambda x: x
    options = {"noop_with_empty_axes": 1}
    nodes = [H.make_node(f"Reduce{n}", ["x", "axes"], [n], **options) for n in functions]
    outputs = {name: (TensorProto.FLOAT, [2, 3]) for name in functions}
    axes = {"axes": np.array([], "int64")}
    model = _model(nodes, {"x": (TensorProto.FLOAT, [2, 3])}, outputs, axes)
    with np.errstate(all="ignore"):
        for result, function in zip(_results(model, data), functions.values(), strict=True):
            np.testing.assert_allclose(result, function(data), 1e-6)


@pytest.mark.parametrize("name", ["ArgMax", "ArgMin", "GlobalMaxPool"])
def test_extremes_of_nothing_are_refused(name):
    """ArgMax returned memory that nothing had written."""
    kind, shape = TensorProto.FLOAT, [1, 2, "rows", 3]
    result = {"y": (kind if name == "GlobalMaxPool" else TensorProto.INT64, None)}
    options = {} if name == "GlobalMaxPool" else {"axis": 2}
    model = _model([H.make_node(name, ["x"], ["y"], **options)], {"x": (kind, shape)}, result)
    (check,) = extent_checks(from_model(model).module, "main")
    check.check({"rows": 1})
    with pytest.raises(ValueError, match=r"extreme .* rows = 0"):
        check.check({"rows": 0})
    nodes = [
        H.make_node("Slice", ["x", "zero", "zero", "axes"], ["none"]),
        H.make_node(name, ["none"], ["y"], **options),
    ]
    constants = {"zero": np.array([0]), "axes": np.array([2])}
    model = _model(nodes, {"x": (kind, [1, 2, 4, 3])}, result, constants)
    with pytest.raises(UnsupportedOperatorError, match="an axis of 0 elements"):
        from_model(model)
