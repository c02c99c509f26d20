"""Extents that a graph computes from symbolic ones: values by ONNX's evaluator and gradients by
differences, at several sizes."""

from __future__ import annotations

import numpy as np
import pytest

import relax_grad

onnx = pytest.importorskip("onnx", reason="the package onnx is not installed: extra onnx")

import onnx_models as models  # noqa: E402
from onnx import TensorProto, numpy_helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402
from onnx_models import node, normal  # noqa: E402
from tvm import relax, tirx  # noqa: E402

from relax_grad.frontend.onnx import UnsupportedOperatorError, from_model  # noqa: E402
from relax_grad.ir.compat import Analyzer  # noqa: E402
from relax_grad.ir.expressions import substitute, variables  # noqa: E402
from relax_grad.ir.extent_checks import extent_checks  # noqa: E402

SIZES = ((2, 7), (3, 10), (1, 6))

#: Numbers by their names; a list is a vector.
NUMBERS = {"zero": [0], "one": [1], "two": [2], "three": [3], "four": [4], "minus": [-1],
    "minus_two": [-2], "minus_three": [-3], "many": [2**62], "lowest": [-(2**62)], "at": 1,
    "at_0": 0, "s0": 0, "s1": 1, "s2": 2}  # fmt: skip

#: The batch ``n``, the steps ``t`` and the half of the steps of the input ``x``, as vectors and as
#: numbers.
COMMON = [
    node("Shape", ["x"], ["shape"]),
    node("Gather", ["shape", "zero"], ["n"]),
    node("Gather", ["shape", "one"], ["t"]),
    node("Gather", ["shape", "at"], ["t0"]),
    node("Div", ["t", "two"], ["half"]),
    node("Sub", ["t", "half"], ["rest"]),
]

#: Nodes from ``h``, of shape (n, t, 4), to ``y``.
CASES = {
    "slice_half": [node("Slice", ["h", "zero", "half", "one"])],
    "slice_last": [node("Neg", ["half"], ["back"]), node("Slice", ["h", "back", "many", "one"])],
    "slice_steps": [node("Slice", ["h", "one", "t", "one", "two"])],
    "slice_past_end": [node("Add", ["t", "three"], ["end"]),
    node("Slice", ["h", "half", "end", "one"])],
    "slice_last_three": [node("Slice", ["h", "minus_three", "many", "one"])],
    "slice_without_last": [node("Slice", ["h", "one", "minus", "one"])],
    "slice_flipped": [node("Slice", ["h", "minus", "lowest", "one", "minus"])],
    "slice_backwards": [node("Slice", ["h", "minus_two", "one", "one", "minus_two"])],
    "slice_backwards_half": [node("Slice", ["h", "half", "lowest", "one", "minus_three"])],
    "power": [
        node("Pow", ["t", "two"], ["square"]),
        node("Div", ["square", "t"], ["same"]),
        node("Div", ["same", "two"], ["end"]),
        node("Slice", ["h", "zero", "end", "one"]),
    ],
    "windows": [  # the steps are enough for the windows, as the pool shows
        node("Transpose", ["h"], ["turned"], perm=[0, 2, 1]),
        node("MaxPool", ["turned"], ["pooled"], kernel_shape=[3], strides=[2]),
        node("Sub", ["t", "three"], ["room"]),
        node("Div", ["room", "two"], ["gaps"]),
        node("Add", ["gaps", "one"], ["count"]),
        node("Concat", ["n", "two", "two", "count"], ["wanted"], axis=0),
        node("Reshape", ["pooled", "wanted"], ["parts"]),
        node("Squeeze", ["gaps", "zero"], ["last"]),
        node("Range", ["s0", "last", "s1"], ["places"]),
        node("Gather", ["parts", "places"], ["rows"], axis=3),
        node("Slice", ["parts", "zero", "minus", "three"], ["front"]),
        node("Add", ["rows", "front"]),
    ],
    # as PyTorch's exporter writes it: a negative quotient that is not whole is one less
    "floor_division": [
        node("Div", ["t", "three"], ["quotient"]),
        node("Less", ["t", "zero"], ["one_is_negative"]),
        node("Less", ["three", "zero"], ["other_is_negative"]),
        node("Xor", ["one_is_negative", "other_is_negative"], ["is_negative"]),
        node("Mod", ["t", "three"], ["over"]),
        node("Equal", ["over", "zero"], ["is_whole"]),
        node("Not", ["is_whole"], ["is_broken"]),
        node("And", ["is_negative", "is_broken"], ["is_less"]),
        node("Sub", ["quotient", "one"], ["less"]),
        node("Where", ["is_less", "less", "quotient"], ["end"]),
        node("Slice", ["h", "zero", "end", "one"]),
    ],
    "pairs": [  # as PyTorch's exporter writes the widths of paddings
        node("Concat", ["half", "zero", "zero", "one"], ["ends"], axis=0),
        node("Reshape", ["ends", "pair"], ["rows"]),
        node("Slice", ["rows", "minus", "lowest", "zero", "minus"], ["turned"]),
        node("Transpose", ["turned"], ["columns"], perm=[1, 0]),
        node("Reshape", ["columns", "minus"], ["flat"]),
        node("Pad", ["h", "flat", "", "last_axes"], mode="reflect"),
    ],
    "top_k": [
        node("TopK", ["h", "half"], ["largest", "order"], axis=1),
        node("TopK", ["largest", "half"], ["least", "places"], axis=1, largest=0),
        node("Sin", ["least"]),
    ],
    "table": [
        node("Slice", ["positions", "zero", "t", "zero"], ["front"]),
        node("Add", ["h", "front"]),
    ],
    "range": [
        node("Range", ["s0", "t0", "s1"], ["places"]),
        node("Gather", ["positions", "places"], ["rows"]),
        node("Mul", ["h", "rows"]),
    ],
    "range_steps": [
        node("Range", ["s1", "t0", "s2"], ["places"]),
        node("Gather", ["h", "places"], axis=1),
    ],
    "range_float": [
        node("Cast", ["t0"], ["end"], to=TensorProto.DOUBLE),
        node("Range", ["f0", "end", "f1"], ["places"]),
        node("Unsqueeze", ["places", "one"], ["column"]),
        node("Mul", ["h", "column"]),
    ],
    "expand": [
        node("Concat", ["n", "t", "one"], ["wide"], axis=0),
        node("Expand", ["scale", "wide"], ["grown"]),
        node("Mul", ["h", "grown"]),
    ],
    "expand_where": [
        node("Concat", ["n", "minus", "four"], ["wanted"], axis=0),
        node("Equal", ["wanted", "minus"], ["is_free"]),
        node("Where", ["is_free", "one", "wanted"], ["wide"]),
        node("Expand", ["scale", "wide"], ["grown"]),
        node("Mul", ["h", "grown"]),
    ],
    "heads": [
        node("Concat", ["n", "t", "two", "two"], ["split"], axis=0),
        node("Reshape", ["h", "split"], ["parts"]),
        node("Transpose", ["parts"], ["turned"], perm=[0, 2, 1, 3]),
        node("Mul", ["n", "two"], ["rows"]),
        node("Concat", ["rows", "t", "minus"], ["joined"], axis=0),
        node("Reshape", ["turned", "joined"], ["flat"]),
        node("Concat", ["n", "two", "t", "two"], ["back"], axis=0),
        node("Reshape", ["flat", "back"]),
    ],
    "rows": [
        node("Mul", ["n", "t"], ["count"]),
        node("Concat", ["count", "minus"], ["flat"], axis=0),
        node("Reshape", ["h", "flat"], ["rows"]),
        node("Concat", ["n", "minus", "four"], ["back"], axis=0),
        node("Reshape", ["rows", "back"]),
    ],
    "tile": [node("Concat", ["one", "half", "two"], ["times"], axis=0),
    node("Tile", ["h", "times"])],
    "split": [
        node("Concat", ["half", "rest"], ["sizes"], axis=0),
        node("Split", ["h", "sizes"], ["a", "b"], axis=1),
        node("ReduceSum", ["b", "one"], ["total"]),
        node("Mul", ["a", "total"]),
    ],
    "split_even": [
        node("Split", ["h"], ["a", "b"], axis=1, num_outputs=2),
        node("ReduceSum", ["b", "one"], ["total"]),
        node("Mul", ["a", "total"]),
    ],
    "constant_of_shape": [
        node("Concat", ["t", "four"], ["wide"], axis=0),
        node("ConstantOfShape", ["wide"], ["ones"], value=numpy_helper.from_array(np.full(1, 1.5))),
        node("Mul", ["h", "ones"]),
    ],
    "pad": [
        node("Mod", ["t", "four"], ["over"]),
        node("Sub", ["four", "over"], ["more"]),
        node("Concat", ["zero", "one", "zero", "zero", "more", "zero"], ["widths"], axis=0),
        node("Pad", ["h", "widths", "half_number"]),
    ],
    "mean": [
        node("Cast", ["t"], ["count"], to=TensorProto.DOUBLE),
        node("ReduceSum", ["h", "one"], ["total"]),
        node("Div", ["total", "count"]),
    ],
    "causal": [
        node("Range", ["s0", "t0", "s1"], ["places"]),
        node("Unsqueeze", ["places", "one"], ["column"]),
        node("LessOrEqual", ["places", "column"], ["seen"]),
        node("Transpose", ["h"], ["turned"], perm=[0, 2, 1]),
        node("MatMul", ["h", "turned"], ["scores"]),
        node("Where", ["seen", "scores", "low"], ["masked"]),
        node("Softmax", ["masked"]),
    ],
    **{
        f"{kind.lower()}_{mode.lower()}": [
            node("Transpose", ["h"], ["turned"], perm=[0, 2, 1]),
            node(kind, ["turned", *(["kernel"] if kind == "Conv" else [])], auto_pad=mode,
                strides=[2], kernel_shape=[3]),
        ]
        for kind, mode in (("Conv", "SAME_UPPER"), ("Conv", "SAME_LOWER"),
            ("MaxPool", "SAME_UPPER"), ("AveragePool", "SAME_UPPER"))
    },
    "resize": [
        node("Transpose", ["h"], ["turned"], perm=[0, 2, 1]),
        node("Mul", ["t", "two"], ["wide"]),
        node("Concat", ["n", "four", "wide"], ["sizes"], axis=0),
        node("Resize", ["turned", "", "", "sizes"], mode="linear"),
    ],
}  # fmt: skip

WEIGHTS = {
    "w": normal(4, 4, dtype="float64"),
    "positions": normal(16, 4, dtype="float64"),
    "scale": normal(1, 1, dtype="float64"),
    "kernel": normal(3, 4, 3, dtype="float64"),
}

CONSTANTS = {
    **{name: np.array(value, "int64") for name, value in NUMBERS.items()},
    "pair": np.array([2, 2]),
    "last_axes": np.array([1, 2]),
    "f0": np.array(0.0),
    "f1": np.array(1.0),
    "half_number": np.array(0.5),
    "low": np.array(-1e9),
}


def renamed(origin, prefix: str, kept):
    """Return nodes with a prefix before the names of their values."""
    copy = onnx.NodeProto()
    copy.CopyFrom(origin)
    for names in (copy.input, copy.output):
        names[:] = [name if not name or name in kept else prefix + name for name in names]
    return copy


def model_of(cases, shape=("batch", "steps", 4)):
    """Return a model with the results of cases on the product of its input and a weight."""
    kept = {
        "h",
        *WEIGHTS,
        *CONSTANTS,
        *(name for common_node in COMMON for name in common_node.output),
    }
    nodes = [*COMMON, node("MatMul", ["x", "w"], ["h"])]
    for name in cases:
        nodes += [renamed(part, f"{name}/", kept) for part in CASES[name]]
    outputs = [f"{name}/y" for name in cases]
    return models.model_of(
        nodes, {"x": list(shape)}, {**WEIGHTS, **CONSTANTS}, outputs, dtype="float64"
    )


def loss(bb, *results):
    total = None
    for result in results:
        part = bb.emit(relax.op.mean(relax.op.sin(result)))
        total = part if total is None else bb.emit(relax.op.add(total, part))
    return total


@pytest.fixture(scope="module")
def compiled():
    """One compilation of all cases, for all sizes."""
    model = model_of(CASES)
    imported = from_model(model, trainable=list(WEIGHTS))
    for name, kind in imported.outputs.items():
        assert isinstance(kind.shape, relax.ShapeExpr), name
    module = relax_grad.value_and_grad(imported.with_loss(loss), "loss", wrt=list(WEIGHTS))
    return imported, models.compiled(module, None)


@pytest.mark.parametrize("sizes", SIZES)
def test_computed_extents_have_the_values_of_the_evaluator(compiled, sizes):
    imported, call = compiled
    x = normal(*sizes, 4, dtype="float64")
    results = call("main", x, *imported.values)
    without = {"averagepool_same_upper", "maxpool_same_upper", "conv_same_lower", "conv_same_upper"}
    names = [name for name in CASES if name not in without]
    expected = ReferenceEvaluator(model_of(names)).run(None, {"x": x})
    for name, value in zip(names, expected, strict=True):
        result = results[list(CASES).index(name)]
        assert result.shape == value.shape, name
        np.testing.assert_allclose(result, value, 1e-6, 1e-7, err_msg=name)


@pytest.mark.parametrize("sizes", SIZES)
def test_computed_extents_have_the_gradients_of_differences(compiled, sizes):
    imported, call = compiled
    x, rng, step = normal(*sizes, 4, dtype="float64"), np.random.default_rng(0), 1e-6
    values = [value.numpy() for value in imported.params.values()]
    rest = [*imported.frozen.values(), *imported.states.values()]
    _, gradients = call("loss_adjoint", x, *values, *rest)
    directions = [rng.normal(size=value.shape) for value in values]
    ahead, behind = (
        call(
            "loss",
            x,
            *(v + sign * step * d for v, d in zip(values, directions, strict=True)),
            *rest,
        )
        for sign in (1, -1)
    )
    slope = sum(float(np.sum(g * d)) for g, d in zip(gradients, directions, strict=True))
    np.testing.assert_allclose(slope, (ahead - behind) / (2 * step), rtol=1e-6)


@pytest.mark.parametrize("sizes", SIZES)
def test_windows_of_symbolic_extents_have_the_values_of_onnxruntime(compiled, sizes):
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    imported, call = compiled
    names = [name for name in CASES if "same" in name]
    model = model_of(names)
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.DOUBLE:
            value = numpy_helper.to_array(tensor).astype("float32")
            tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))
    for tensor in (*model.graph.input, *model.graph.output):
        tensor.type.tensor_type.elem_type = TensorProto.FLOAT
    x = normal(*sizes, 4)
    session = runtime.InferenceSession(model.SerializeToString())
    results = call("main", x.astype("float64"), *imported.values)
    for name, value in zip(names, session.run(None, {"x": x}), strict=True):
        np.testing.assert_allclose(
            results[list(CASES).index(name)], value, 1e-4, 1e-4, err_msg=name
        )


@pytest.mark.parametrize("case", ["table", "range"])
def test_rows_behind_a_table_are_nan(case):
    """A table of 16 positions has none for the rest of 20 steps."""
    model = model_of([case])
    result = models.outputs(from_model(model), {"x": normal(1, 20, 4, dtype="float64")})[0]
    assert np.isfinite(result[:, :16]).all()
    assert np.isnan(result[:, 16:]).all()


def test_extents_that_are_equal_for_some_sizes_are_compared_at_run_time():
    """A shortcut is joined with, and added to, what was halved and doubled; results are NaN where
    the extents differ."""
    nodes = [
        node("Mul", ["x", "w"], ["h"]),
        node("MaxPool", ["h"], ["small"], kernel_shape=[3], strides=[2], pads=[1, 1]),
        node("Resize", ["small", "", "double"], ["large"]),
        node("Concat", ["h", "large"], ["joined"], axis=1),
        node("Add", ["large", "h"], ["total"]),
    ]
    weights = {"w": normal(2, 1, dtype="float64"), "double": np.array([1, 1, 2], "float32")}
    outputs = ("joined", "total")
    model = models.model_of(nodes, {"x": [1, 2, "t"]}, weights, outputs, dtype="float64")
    imported = from_model(model)
    assert [str(output.shape) for output in imported.outputs.values()] == ["R.shape([1, 4, t])",
        "R.shape([1, 2, t])"]  # fmt: skip
    module = relax_grad.value_and_grad(imported.with_loss(loss), "loss", wrt=["w"])
    call, w = models.compiled(module, None), imported.params["w"].numpy()
    for steps in (4, 10):
        x = normal(1, 2, steps, dtype="float64")
        for result, other in zip(call("main", x, w), models.wanted(model, {"x": x}), strict=True):
            np.testing.assert_allclose(result, other, 1e-9)
        (gradient,) = call("loss_adjoint", x, w)[1]
        ahead, behind = (call("loss", x, w + step) for step in (1e-6, -1e-6))
        np.testing.assert_allclose(gradient.sum(), (ahead - behind) / 2e-6, rtol=1e-6)
    joined, total = call("main", normal(1, 2, 7, dtype="float64"), w)
    assert np.isnan(joined[:, 2:]).all()
    assert np.isnan(total).all()


REFUSED = {
    "a_bound_of_either_sign": (
        [node("Sub", ["t", "four"], ["end"]), node("Slice", ["x", "zero", "end", "one"])],
        "may be negative or not",
    ),
    "two_symbols": (
        [node("Concat", ["n", "n", "four"], ["wide"], axis=0), node("Expand", ["x", "wide"])],
        "broadcasts the extent steps to batch, which are not known to be equal",
    ),
    "broadcast": (
        [node("Transpose", ["x"], ["turned"], perm=[1, 0, 2]), node("Add", ["x", "turned"])],
        "its operands have the extents steps and batch, which are not known to be equal",
    ),
    "squeeze": ([node("Squeeze", ["x", "one"])], "the extent steps of its axis 1 must be 1"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_known_names_the_node_the_extent_and_the_remedy(case):
    nodes, message = REFUSED[case]
    model = models.model_of(
        [*COMMON, *nodes], {"x": ["batch", "steps", 4]}, {**CONSTANTS}, dtype="float64"
    )
    with pytest.raises(UnsupportedOperatorError, match=message) as error:
        from_model(model)
    assert f"{nodes[-1].op_type} 'y'" in str(error.value)
    assert "shapes={...}" in str(error.value)


def random_extent(seed: int):
    """Return a model with one output, whose extent is a random expression of those of its input."""
    rng = np.random.default_rng(seed)
    nodes = [node("Shape", ["x"], ["shape"])]
    nodes += [node("Gather", ["shape", place], [place + "v"]) for place in ("zero", "one")]
    constants, values = {"zero": np.array([0]), "one": np.array([1])}, ["zerov", "onev"]
    for k in range(rng.integers(1, 7)):
        kind = rng.choice(
            ["Add", "Sub", "Mul", "Div", "Mod", "Max", "Min", "Floor", "Ceil", "Neg", "number"]
        )
        a, b = rng.choice(values, 2)
        name, number = f"v{k}", f"c{k}"
        if kind in ("Floor", "Ceil"):
            constants[number] = np.float32([rng.choice([0.25, 0.5, 1.5, 2.0])])
            nodes += [
                node("Cast", [a], [name + "a"], to=TensorProto.FLOAT),
                node("Mul", [name + "a", number], [name + "b"]),
                node(kind, [name + "b"], [name + "c"]),
                node("Cast", [name + "c"], [name], to=TensorProto.INT64),
            ]
        elif kind == "number":
            constants[number] = np.array([rng.choice([1, 2, 3, 4, 7])])
            nodes.append(node(rng.choice(["Add", "Mul", "Div", "Sub", "Mod"]), [a, number], [name]))
        else:
            nodes.append(node(kind, [a] if kind == "Neg" else [a, b], [name]))
        values.append(name)
    nodes += [node("Max", [values[-1], "zero"], ["last"]), node("ConstantOfShape", ["last"])]
    return models.model_of(nodes, {"x": ["b", "t", 2]}, constants)


@pytest.mark.parametrize("first", [0, pytest.param(40, marks=pytest.mark.slow)])
def test_random_extents_are_those_of_the_evaluator(first):
    known = 0
    with np.errstate(divide="ignore"):
        for seed in range(first, 40 if first == 0 else 400):
            model = random_extent(seed)
            try:
                shape = from_model(model).outputs["y"].shape
            except (ValueError, UnsupportedOperatorError):
                continue  # a division by 0, or an extent that stays unknown
            for sizes in ({"b": 2, "t": 7}, {"b": 1, "t": 1}, {"b": 5, "t": 4}):
                x = np.zeros((sizes["b"], sizes["t"], 2), "float32")
                (expected,) = models.wanted(model, {"x": x})
                numbers = {
                    var: tirx.IntImm("int64", sizes[var.name]) for var in variables(shape.values[0])
                }
                extent = Analyzer().simplify(substitute(shape.values[0], numbers))
                assert int(extent) == expected.shape[0], seed
            known += 1
    assert known > (20 if first == 0 else 200)


@pytest.mark.parametrize("kind", ["Concat", "MatMul"])
def test_symbols_that_a_node_makes_equal_are_one(kind):
    """tf2onnx gives each input a batch of its own."""
    shapes = {"Concat": (["a", 3], ["b", 4]), "MatMul": ([2, "a"], ["b", 3])}[kind]
    attributes = {"axis": 1} if kind == "Concat" else {}
    nodes = [
        node(kind, ["x", "z"], ["c"], **attributes),
        node("Mul", ["c", "w"]),
    ]
    last = 7 if kind == "Concat" else 3
    inputs = dict(zip(("x", "z"), shapes, strict=True))
    model = models.model_of(nodes, inputs, {"w": normal(last)})
    imported = from_model(model)
    x, z = ([str(e) for e in kept.shape.values] for kept in imported.inputs.values())
    assert (x[shapes[0].index("a")], z[shapes[1].index("b")]) == ("a", "a")
    extents = [[5 if isinstance(e, str) else e for e in shape] for shape in shapes]
    feeds = {name: normal(*shape) for name, shape in zip(inputs, extents, strict=True)}
    models.check_outputs(imported, model, feeds)
    feeds["z"] = normal(*(6 if isinstance(e, str) else e for e in shapes[1]))
    with pytest.raises(Exception, match=r"(?i)mismatch"):
        models.outputs(imported, feeds)


def test_products_of_related_extents_are_compared_at_run_time():
    """A number of rows that is halved and doubled is that of the other operand for even numbers."""
    nodes = [
        node("Shape", ["x"], ["shape"]),
        node("Gather", ["shape", "zero"], ["rows"]),
        node("Div", ["rows", "two"], ["half"]),
        node("Mul", ["half", "two"], ["even"]),
        node("Expand", ["w", "even"], ["columns"]),
        node("Unsqueeze", ["columns", "zero"], ["row"]),
        node("MatMul", ["row", "x"]),
    ]
    weights = {"zero": np.array([0]), "two": np.array([2]), "w": normal(1)}
    model = models.model_of(nodes, {"x": ["n", 3]}, weights)
    call = models.compiled((imported := from_model(model)).module)
    for rows in (4, 5):
        x = normal(rows, 3)
        result = call(x, *imported.values)
        if rows == 5:
            assert np.isnan(result).all()
        else:
            np.testing.assert_allclose(result, models.wanted(model, {"x": x})[0], rtol=1e-5)


@pytest.mark.parametrize(
    "nodes",
    [
        [node("Expand", ["x", "shape"])],
        [node("ConstantOfShape", ["shape"], ["ones"]), node("Add", ["x", "ones"])],
    ],
    ids=["Expand", "ConstantOfShape"],
)
def test_a_shape_that_is_an_input_is_refused(nodes):
    """TVM broadcasts to it in one direction, and does not compile a constant of it."""
    model = models.model_of(nodes, {"x": [1, 3]}, {})
    kind = onnx.TensorProto.INT64
    model.graph.input.append(onnx.helper.make_tensor_value_info("shape", kind, [2]))
    with pytest.raises(UnsupportedOperatorError, match="its shape is known only at run time"):
        from_model(model)
    imported = from_model(model, constants={"shape": [4, 1]})
    assert [int(extent) for extent in imported.outputs["y"].shape.values] == [4, 3]


def test_extents_that_must_be_equal_are_conditions():
    """The Trainer checks them; a call of the function itself returns NaN."""
    nodes = [
        node("MaxPool", ["x"], ["down"], kernel_shape=[2], strides=[2]),
        node("Concat", ["down", "down"], ["twice"], axis=2),
        node("Add", ["twice", "x"], ["sum"]),
        node("Shape", ["x"], ["shape"]),
        node("Gather", ["shape", "two"], ["t"]),
        node("Slice", ["table", "zero", "t", "zero"], ["rows"]),
        node("MatMul", ["sum", "rows"], ["y"]),
    ]
    weights = {"table": normal(6, 4), **{k: np.array(NUMBERS[k]) for k in ("zero", "two")}}
    imported = from_model(models.model_of(nodes, {"x": ["b", 2, "t"]}, weights, ["y"], opset=18))
    module = imported.with_loss(lambda bb, y: bb.emit(relax.op.sum(y)))
    for name in ("main", "loss"):
        halves, rows = extent_checks(module, name)
        for check in (halves, rows):
            check.check({"t": 6})
        with pytest.raises(ValueError, match=r"t and t // 2 \* 2, which must be equal, .* t = 5"):
            halves.check({"t": 5})
        with pytest.raises(ValueError, match=r"table of 6 rows is read up to the row t, .* t = 8"):
            rows.check({"t": 8})


@pytest.mark.parametrize("kind", ["FLOAT8E4M3FN", "FLOAT8E5M2FNUZ", "INT4", "UINT4"])
def test_computed_values_of_small_types_are_refused(kind):
    """TVM drops the casts. Constants are folded."""
    to = getattr(TensorProto, kind)
    nodes = [node("Cast", ["x"], ["a"], to=to), node("Cast", ["a"], ["y"], to=TensorProto.FLOAT)]
    with pytest.raises(UnsupportedOperatorError, match="Cast 'a': it computes values of"):
        from_model(models.model_of(nodes, {"x": [2, 4]}, {}, ["y"], opset=21))
