"""A small node of every operator of ONNX that the importer takes, with values of its operands."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import onnx
import onnx_models
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import relax_grad
from relax_grad.frontend.onnx import from_model

from .deformed import DeformConv

RNG = np.random.default_rng(3)

NOTHING: Mapping = MappingProxyType({})


class Case(NamedTuple):
    """A node: arrays of float64 are weights, others are constants, and None is an operand that is
    left out.

    Attributes
    ----------
    operands : tuple
        The values of the operands.
    attributes : Mapping
        The attributes of the node.
    count : int
        The number of its results.
    kept : tuple[int, ...]
        The results that are outputs of the model.
    nodes : tuple
        The nodes, if there are several.
    fixed : tuple[int, ...]
        The operands that are no weights, in spite of their dtype.
    """

    operands: tuple
    attributes: Mapping = NOTHING
    count: int = 1
    kept: tuple[int, ...] = (0,)
    nodes: tuple = ()
    fixed: tuple[int, ...] = ()


def chain(*operands, nodes, count: int = 1) -> Case:
    """Return a case of several nodes, whose operands are ``0``, ``1``, ... and whose results are
    ``y0``, ``y1``, ..."""
    return Case(operands, {}, count, tuple(range(count)), tuple(nodes))


def floats(*shape, low=0.2, high=0.8):
    return RNG.uniform(low, high, shape)


def integers(*values, dtype="int64"):
    return np.array(values, dtype)


def scalar(value, dtype="int64"):
    return np.array(value, dtype)


def unary(*shape, low=0.2, high=0.8, **attributes) -> Case:
    return Case((floats(*(shape or (2, 3)), low=low, high=high),), attributes)


def binary(**attributes) -> Case:
    return Case((floats(2, 3), floats(3)), attributes)


def picture(*extra, **attributes) -> Case:
    return Case((floats(1, 2, 4, 5, low=-1, high=1), *extra), attributes)


def reduced() -> Case:
    return Case((floats(2, 3, 4), integers(1)), {"keepdims": 0})


def branch(kind: str) -> onnx.GraphProto:
    output = helper.make_tensor_value_info("inner", TensorProto.DOUBLE, [2, 3])
    return helper.make_graph([helper.make_node(kind, ["1"], ["inner"])], kind, [], [output])


def loop_body() -> onnx.GraphProto:
    """Return ``s -> s * 3``, whose last operand is that of the node outside, and the square of the
    new state."""
    value = helper.make_tensor_value_info
    return helper.make_graph(
        [node("Mul", ["s", "3"], ["new"]), node("Mul", ["new", "new"], ["row"]),
            node("Identity", ["c"], ["go"])],
        "body",
        [value("i", TensorProto.INT64, []), value("c", TensorProto.BOOL, []),
            value("s", TensorProto.DOUBLE, [2])],
        [value("go", TensorProto.BOOL, []), value("new", TensorProto.DOUBLE, [2]),
            value("row", TensorProto.DOUBLE, [2])],
    )  # fmt: skip


def scan_body() -> onnx.GraphProto:
    value = helper.make_tensor_value_info
    return helper.make_graph(
        [node("Mul", ["s", "x"], ["new"]), node("Sin", ["new"], ["row"])],
        "body",
        [value("s", TensorProto.DOUBLE, [2]), value("x", TensorProto.DOUBLE, [2])],
        [value("new", TensorProto.DOUBLE, [2]), value("row", TensorProto.DOUBLE, [2])],
    )


def node(kind, inputs, outputs=("y0",), **attributes):
    return helper.make_node(kind, list(inputs), list(outputs), **attributes)


def recurrent(gates: int) -> Case:
    operands = (
        floats(3, 2, 4),
        floats(1, gates * 5, 4),
        floats(1, gates * 5, 5),
        floats(1, gates * 10),
    )
    return Case(operands, {"hidden_size": 5})


def symmetric(*shape):
    return floats(*shape, low=-1, high=1)


BOXES = np.array([[0.4, 0.5, 3.2, 2.6], [1.1, 0.3, 3.7, 3.1]])

PAIR = node("SequenceConstruct", ["0", "1"], ["s"])
FIRST = node("SequenceAt", ["t", "2"])

SEQUENCES = {
    "ConcatFromSequence": chain(
        floats(4, 2), integers(1, 3),
        nodes=[node("SplitToSequence", ["0", "1"], ["s"], axis=0),
            node("ConcatFromSequence", ["s"], axis=0)],
    ),
    "SequenceConstruct": chain(floats(2), floats(2), scalar(1),
    nodes=[PAIR, node("SequenceAt", ["s", "2"])]),
    "SequenceEmpty": chain(
        floats(2), scalar(0),
        nodes=[
            node("SequenceEmpty", [], ["e"], dtype=TensorProto.DOUBLE),
            node("SequenceInsert", ["e", "0"], ["s"]),
            node("SequenceAt", ["s", "1"]),
        ],
    ),
    "SequenceErase": chain(
        floats(2), floats(2), scalar(0),
        nodes=[PAIR, node("SequenceErase", ["s", "2"], ["t"]), FIRST]
    ),
    "SequenceInsert": chain(
        floats(2), floats(2), scalar(0),
        nodes=[PAIR, node("SequenceInsert", ["s", "0", "2"], ["t"]), FIRST]
    ),
    "SequenceLength": chain(
        floats(2),
        nodes=[node("SequenceConstruct", ["0", "0"], ["s"]), node("SequenceLength", ["s"], ["n"]),
            node("Cast", ["n"], ["c"], to=TensorProto.DOUBLE), node("Mul", ["0", "c"])],
    ),
    "Optional": chain(floats(2), nodes=[node("Optional", ["0"], ["o"]),
        node("OptionalGetElement", ["o"])]),
    "OptionalGetElement": chain(floats(2), nodes=[node("OptionalGetElement", ["0"])]),
    "OptionalHasElement": chain(
        floats(2),
        nodes=[node("OptionalHasElement", ["0"], ["h"]), node("Where", ["h", "0", "0"])],
    ),
}  # fmt: skip

TRAINS: dict[str, Case] = {
    **{kind: unary(low=-1, high=1) for kind in ("Abs", "Atan", "Celu", "Cos", "Cosh", "Elu", "Erf",
    "Exp", "Gelu", "HardSigmoid")},
    **{kind: unary(low=-1, high=1) for kind in ("HardSwish", "Identity", "LeakyRelu", "LogSoftmax",
    "LpNormalization", "Mish", "Neg")},
    **{kind: unary(low=-1, high=1) for kind in ("Relu", "Selu", "Shrink", "Sigmoid", "Sin", "Sinh",
    "Softmax", "Softplus", "Softsign")},
    **{kind: unary(low=-1, high=1) for kind in ("Tanh", "Tan", "Asinh", "Flatten")},
    **{kind: unary() for kind in ("Acos", "Asin", "Atanh", "Log", "Reciprocal", "Sqrt",
    "Transpose")},
    **{kind: binary() for kind in ("Add", "Div", "Max", "Mean", "Min", "Mul", "PRelu", "Pow", "Sub",
    "Sum")},
    **{f"Reduce{kind}": reduced() for kind in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean",
    "Min", "Prod", "Sum", "SumSquare")},
    "Acosh": unary(low=1.2, high=2),
    "AffineGrid": Case((floats(2, 2, 3), integers(2, 1, 3, 4)), {}),
    "Attention": Case((symmetric(2, 2, 3, 4), symmetric(2, 2, 5, 4), symmetric(2, 2, 5, 3))),
    "AveragePool": picture(kernel_shape=[2, 3], strides=[2, 1]),
    "BatchNormalization": picture(floats(2), floats(2), floats(2),
    floats(2))._replace(fixed=(3, 4)),
    "Cast": unary(to=TensorProto.DOUBLE),
    "CastLike": Case((floats(2, 3), scalar(0.0, "float64")), fixed=(1,)),
    "CausalConvWithState": Case((symmetric(2, 3, 5), symmetric(3, 1, 4), symmetric(3),
    symmetric(2, 3, 3)), {"activation": "silu"}, 2, (0, 1)),
    "CenterCropPad": Case((floats(3, 4), integers(5, 2))),
    "Clip": Case((floats(2, 3), scalar(0.3, "float64"), scalar(0.6, "float64")), fixed=(1, 2)),
    "Col2Im": Case((symmetric(1, 8, 12), integers(4, 5), integers(2, 2))),
    "Compress": Case((floats(4, 3), np.array([True, False, True, True])), {"axis": 0}),
    "Concat": Case((floats(2, 3), floats(1, 3)), {"axis": 0}),
    "Conv": picture(symmetric(3, 2, 2, 2), symmetric(3)),
    "ConvTranspose": picture(symmetric(2, 3, 2, 2), symmetric(3), strides=[2, 1]),
    "CumProd": Case((symmetric(2, 5), scalar(1)), {"exclusive": 1, "reverse": 1}),
    "CumSum": Case((floats(2, 3), scalar(1))),
    "DFT": Case((symmetric(2, 4, 1), None, scalar(1))),
    "DeformConv": picture(symmetric(3, 2, 2, 2), symmetric(1, 8, 3, 4), symmetric(3)),
    "Det": unary(2, 3, 3, low=-1, high=1),
    "DepthToSpace": unary(1, 8, 2, 3, blocksize=2),
    "Dropout": unary(),
    "Einsum": Case((floats(2, 3), floats(3, 4)), {"equation": "ij,jk->ki"}),
    "Expand": Case((floats(2, 1), integers(2, 3))),
    "GRU": recurrent(3),
    "Gather": Case((floats(4, 3), integers(2, 0, 2)), {}),
    "GatherElements": Case((floats(3, 3), np.array([[0, 2], [1, 1], [2, 0]])), {"axis": 1}),
    "GatherND": Case((floats(3, 4), np.array([[0, 1], [2, 3]]))),
    "Gemm": Case((floats(2, 3), floats(4, 3), floats(4)), {"transB": 1, "alpha": 0.5}),
    "GlobalAveragePool": picture(),
    "GlobalLpPool": picture(),
    "GlobalMaxPool": picture(),
    "GridSample": picture(symmetric(1, 3, 2, 2)),
    "GroupNormalization": Case((symmetric(2, 4, 3), floats(4), floats(4)), {"num_groups": 2}),
    "If": chain(
        np.array(True), floats(2,
            3), nodes=[node("If", ["0"], then_branch=branch("Sin"), else_branch=branch("Cos"))]
    ),
    "InstanceNormalization": picture(floats(2), floats(2)),
    "LRN": unary(4, 4, 2, 1, low=-1, high=1, size=3, alpha=0.5),
    "LSTM": recurrent(4),
    "LayerNormalization": Case((floats(2, 4), floats(4), floats(4))),
    "LinearAttention": Case((symmetric(2, 4, 6), symmetric(2, 4, 6), symmetric(2, 4, 4), None,
    symmetric(2, 4, 2), symmetric(2, 4, 2)), {"q_num_heads": 2, "kv_num_heads": 2}, 2, (0, 1)),
    "LpPool": picture(kernel_shape=[2, 2]),
    "MatMul": Case((floats(2, 3), floats(3, 4))),
    "MaxPool": picture(kernel_shape=[2, 2]),
    "MaxRoiPool": picture(np.array([[0, 0, 0, 3, 2], [0, 1, 0, 4, 3]], "float64"),
    pooled_shape=[2, 2]),
    "MaxUnpool": Case((floats(1, 1, 2, 2), np.array([[[[1, 3], [8, 14]]]])),
    {"kernel_shape": [2, 2], "strides": [2, 2]}),
    "MeanVarianceNormalization": picture(),
    "Mod": Case((floats(2, 3, low=1, high=3), floats(3)), {"fmod": 1}),
    "NegativeLogLikelihoodLoss": Case((floats(3, 4), integers(1, 0, 3))),
    "Pad": Case((floats(2, 3), integers(1, 0, 0, 2))),
    "RMSNormalization": Case((floats(2, 4), floats(4))),
    "RNN": recurrent(1),
    "Reshape": Case((floats(2, 3), integers(3, -1))),
    "Resize": picture(None, integers(1, 1, 2, 2, dtype="float32"), mode="linear"),
    "ReverseSequence": Case((floats(4, 2), integers(3, 1)), {"time_axis": 0, "batch_axis": 1}),
    "RoiAlign": picture(BOXES, integers(0, 0), output_height=2,
    output_width=2)._replace(fixed=(1,)),
    "RotaryEmbedding": Case((symmetric(1, 2, 3, 4), np.cos(floats(5, 2)), np.sin(floats(5, 2)),
    integers([0, 2, 4]))),
    "ScatterElements": Case((floats(3, 3), np.array([[1, 0, 2]]), floats(1, 3)), {"axis": 0}),
    "ScatterND": Case((floats(4, 2), np.array([[1], [3]]), floats(2, 2))),
    "SequenceAt": SEQUENCES["SequenceConstruct"],
    **SEQUENCES,
    "STFT": Case((symmetric(1, 12, 1), scalar(3), floats(6), scalar(6))),
    "Loop": chain(
        scalar(3), np.array(True), floats(2), floats(2),
        nodes=[node("Loop", ["0", "1", "2"], ["s", "y0"], body=loop_body())],
    ),
    "Scan": chain(floats(2), floats(3, 2),
    nodes=[node("Scan", ["0", "1"], ["s", "y0"], body=scan_body(), num_scan_inputs=1)]),
    "Slice": Case((floats(4, 3), integers(1), integers(4), integers(0), integers(2))),
    "SoftmaxCrossEntropyLoss": Case((symmetric(3, 4), integers(1, 0, 3))),
    "SpaceToDepth": unary(1, 2, 4, 6, blocksize=2),
    "SplitToSequence": SEQUENCES["ConcatFromSequence"],
    "Split": Case((floats(4, 3), integers(1, 3)), {}, 2, (0, 1)),
    "Squeeze": Case((floats(2, 1, 3), integers(1))),
    "SwiGLU": Case((symmetric(2, 3), symmetric(2, 3)), {"alpha": 1.5}),
    "Swish": unary(low=-1, high=1, alpha=0.75),
    "TensorScatter": Case((symmetric(2, 3, 6, 2), symmetric(2, 3, 4, 2), integers(5, 1)),
    {"mode": "circular"}),
    "ThresholdedRelu": unary(low=-1, high=1, alpha=0.1),
    "Tile": Case((floats(2, 3), integers(2, 1))),
    "TopK": Case((floats(2, 5), integers(2)), {}, 2),
    "Trilu": unary(3, 4),
    "Unsqueeze": Case((floats(2, 3), integers(1))),
    "Where": Case((np.array([True, False, True]), floats(2, 3), floats(2, 3))),
}  # fmt: skip

#: A value of each kind, for operators without a derivative.
SIGNED, TRUTHS, NUMBERS = symmetric(2, 3), np.array([True, False, True]), np.array([3, 5, 6])

FORWARD: dict[str, Case] = {
    **{kind: Case((TRUTHS, TRUTHS[::-1].copy())) for kind in ("And", "Or", "Xor")},
    **{kind: Case((SIGNED,)) for kind in ("ArgMax", "ArgMin", "Ceil", "Floor", "Hardmax", "IsInf",
    "IsNaN", "Round", "Shape", "Sign", "Size")},
    **{kind: Case((NUMBERS, np.array([1, 4, 3]))) for kind in ("BitwiseAnd", "BitwiseOr",
    "BitwiseXor")},
    **{kind: Case((SIGNED, SIGNED[::-1].copy())) for kind in ("Equal", "Greater", "GreaterOrEqual",
    "Less", "LessOrEqual")},
    **{kind: Case((np.array(8),)) for kind in ("BlackmanWindow", "HammingWindow", "HannWindow")},
    **{kind: Case((), {"shape": [2, 3]}) for kind in ("RandomNormal", "RandomUniform")},
    **{kind: Case((SIGNED,)) for kind in ("RandomNormalLike", "RandomUniformLike")},
    "Bernoulli": unary(),
    "BitShift": Case((NUMBERS.astype("uint32"), np.array([1, 2, 1], "uint32")),
    {"direction": "LEFT"}),
    "BitwiseNot": Case((NUMBERS,)),
    "Constant": Case((), {"value": numpy_helper.from_array(SIGNED)}),
    "ConstantOfShape": Case((integers(2, 3),)),
    "DequantizeLinear": Case((np.array([3, -5], "int8"), np.array(0.5, "float32"))),
    "DynamicQuantizeLinear": Case((SIGNED.astype("float32"),), {}, 3),
    "EyeLike": Case((np.ones((2, 3)),)),
    "MatMulInteger": Case((np.array([[1, 2]], "uint8"), np.array([[3], [4]], "uint8"))),
    "MelWeightMatrix": Case((*map(np.array, (3, 8, 16)), np.array(0.0, "float32"),
    np.array(8.0, "float32"))),
    "NonMaxSuppression": Case(
        (np.array([[[0, 0, 1, 1], [0, 0, 1, 0.9], [2, 2, 3, 3]]], "float32"),
        np.array([[[0.9, 0.8, 0.7]]], "float32"),
         integers(2), np.array([0.5], "float32"), np.array([0.1], "float32")),
        {"center_point_box": 0},
    ),
    "NonZero": Case((SIGNED,)),
    "Not": Case((TRUTHS,)),
    "OneHot": Case((integers(2, 0), scalar(3), np.array([0.0, 1.0]))),
    "QuantizeLinear": Case((SIGNED.astype("float32"), np.array(0.1, "float32"),
    np.array(0, "int8"))),
    "Range": Case((scalar(1), scalar(9), scalar(3))),
    "Unique": Case((np.array([2.0, 1.0, 2.0]),)),
}  # fmt: skip

#: Operators whose results are random, or that ONNX's evaluator does not have for float64.
WITHOUT_VALUE = {
    "Bernoulli", "GlobalLpPool", "MaxRoiPool", "MeanVarianceNormalization", "RandomNormal",
    "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Optional",
}  # fmt: skip


def weights_of(cases: Mapping[str, Case]) -> list[str]:
    """Return the names of the weights."""
    return [
        f"{kind}/{i}"
        for kind, case in cases.items()
        for i, value in enumerate(case.operands)
        if value is not None and value.dtype == np.float64 and i not in case.fixed
    ]


def _prefixed(original: onnx.NodeProto, prefix: str) -> onnx.NodeProto:
    """Return a node with a prefix before the names of all values, also in branches."""
    copy = onnx.NodeProto()
    copy.CopyFrom(original)
    for names in (copy.input, copy.output):
        names[:] = [prefix + name if name else "" for name in names]
    for attribute in copy.attribute:
        if attribute.type != onnx.AttributeProto.GRAPH:
            continue
        inner = [_prefixed(each_node, prefix) for each_node in attribute.g.node]
        del attribute.g.node[:]
        attribute.g.node.extend(inner)
        for value in (*attribute.g.input, *attribute.g.output):
            value.name = prefix + value.name
    return copy


def model_of(cases: Mapping[str, Case], opset: int) -> tuple[onnx.ModelProto, dict[str, list[str]]]:
    """Return a model of all cases, and the names of the outputs of each.

    The operands have names such as ``Add/0``. The input ``x``, of shape (1), is not used by the
    cases.
    """
    nodes, weights, outputs = [helper.make_node("Identity", ["x"], ["same"])], [], {}
    for kind, case in cases.items():
        names = ["" if operand is None else str(i) for i, operand in enumerate(case.operands)]
        results = [f"y{i}" for i in range(case.count)]
        node_list = case.nodes or (helper.make_node(kind, names, results, **case.attributes),)
        nodes += [_prefixed(part, f"{kind}/") for part in node_list]
        weights += [
            numpy_helper.from_array(np.asarray(value), f"{kind}/{i}")
            for i, value in enumerate(case.operands)
            if value is not None
        ]
        outputs[kind] = [f"{kind}/y{i}" for i in case.kept]
    every = ["same", *(name for names in outputs.values() for name in names)]
    model = helper.make_model(
        helper.make_graph(
            nodes,
            "operators",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])],
            [helper.make_value_info(name, onnx.TypeProto()) for name in every],
            weights,
        ),
        opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)],
        ir_version=10,
    )
    return model, outputs


def check(
    cases: Mapping[str, Case],
    opset: int,
    values: Mapping[str, np.ndarray] = NOTHING,
    without=WITHOUT_VALUE,
    rtol: float = 1e-6,
) -> None:
    """Compare the results of cases with ONNX's evaluator, and the gradients with differences, in
    one compilation.

    The derivative of each result in a random direction of its weights is the central difference.
    ``values`` has the results of cases that the evaluator does not have, and ``without`` the cases
    whose results are not compared.
    """
    model, outputs = model_of(cases, opset)
    wanted = weights_of(cases)
    imported = from_model(model, trainable=wanted)
    assert sorted(imported.params) == sorted(wanted)
    module = imported.with_loss(lambda bb, same, *results: onnx_models.weighted_sum(bb, *results))
    assert not relax_grad.missing_gradients(module, "loss", wrt=list(imported.params))
    module = relax_grad.value_and_grad(module, "loss", wrt=list(imported.params))
    call = onnx_models.compiled(module, None)
    x, names = np.ones(1, "float32"), [output.name for output in model.graph.output]
    rest = [*imported.frozen.values(), *imported.states.values()]

    def results(params) -> dict[str, np.ndarray]:
        return dict(zip(names, call("main", x, *params, *rest), strict=False))

    params = [value.numpy() for value in imported.params.values()]
    results_found = results(params)
    for kind in cases.keys() - without:
        single, _ = model_of({kind: cases[kind]}, opset)
        if kind in values:
            expected = [values[kind]]
        else:
            expected = ReferenceEvaluator(single, new_ops=[DeformConv]).run(outputs[kind], {"x": x})
        for name, value in zip(outputs[kind], expected, strict=True):
            assert results_found[name].shape == np.shape(value), kind
            np.testing.assert_allclose(results_found[name], value, rtol, rtol / 10, err_msg=kind)
    gradients = call("loss_adjoint", x, *params, *rest)[1]
    rng, step = np.random.default_rng(1), 1e-6
    directions = [rng.normal(size=value.shape) for value in params]
    ahead, behind = (
        results([v + sign * step * d for v, d in zip(params, directions, strict=True)])
        for sign in (1, -1)
    )
    slopes: dict[str, float] = {}
    for name, gradient, direction in zip(imported.params, gradients, directions, strict=True):
        kind = name.partition("/")[0]
        slopes[kind] = slopes.get(kind, 0.0) + float(np.sum(gradient * direction))
    assert slopes.keys() == outputs.keys()
    for kind, slope in slopes.items():
        difference = 0.0
        for name in outputs[kind]:
            shares = np.cos(np.arange(ahead[name].size)).reshape(ahead[name].shape)
            difference += float(np.sum(shares * (ahead[name] - behind[name]))) / (2 * step)
        assert slope != 0, kind
        np.testing.assert_allclose(slope, difference, rtol=1e-5, atol=1e-7, err_msg=kind)
