"""Gradients of indexing operators, and their forward results."""

from __future__ import annotations

import calls
import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from indices import gather_pairs, gathers, read_with_torch, take_pairs, takes
from sweep import TARGET, at_length, batches
from tvm import relax

from relax_grad.testing import (
    TorchCase,
    _program,
    check_gradients,
    check_many_against_torch,
)

SMALLEST, LARGEST = np.iinfo("int64").min, np.iinfo("int64").max
few = settings(max_examples=8, deadline=None, derandomize=True)


def build(function, inputs, symbolic=None):
    """Return a module whose main applies a function to parameters of the types of the inputs."""
    arguments = _program.make_arguments(inputs, None, symbolic or {})
    params = [relax.Var(argument.name, argument.type) for argument in arguments]
    return calls.build(params, function)


def value_of(function, inputs, symbolic=None):
    module = build(function, inputs, symbolic)
    return _program.compile_module(module, TARGET)("main", inputs)


def gradient(function, inputs, order=1):
    """Return the gradient of ``<function(inputs), cotangent>``, and the cotangent.

    At order 2, return the gradient of ``<gradient, direction>`` with respect to the cotangent, and
    the direction.
    """
    arguments = _program.make_arguments(inputs, None, {})
    program = _program.first_order(function, arguments, {}, np.random.default_rng(0))
    weight = "cotangent0"
    if order == 2:
        differentiated = _program.differentiate(program, ["x0"])
        rng = np.random.default_rng(1)
        program = _program.next_order(program, differentiated, ["x0"], rng)
        weight = program.arguments[-1].name
    by_name = {argument.name: argument.value for argument in program.arguments}
    wrt = "x0" if order == 1 else "cotangent0"
    run = _program.compile_module(_program.differentiate(program, [wrt]), TARGET)
    return run("main_adjoint", program.values())[1][0], by_name[weight]


def take_case(case):
    shape, indices, axis, mode = case
    plain = 0 if axis is None else axis % len(shape)
    result_shape = (*shape[:plain], *indices.shape, *shape[plain + 1 :])
    read = read_with_torch(take_pairs(shape, indices, plain, mode), result_shape)
    return TorchCase(
        "relax.take",
        [np.random.default_rng(0).normal(size=shape), indices],
        read,
        {"axis": axis, "mode": mode},
    )


def gather_elements_case(case):
    shape, indices, axis = case
    read = read_with_torch(gather_pairs(shape, indices, axis % len(shape)), indices.shape)
    return TorchCase(
        "relax.gather_elements",
        [np.random.default_rng(0).normal(size=shape), indices],
        read,
        {"axis": axis},
    )


def looks_like_a_reshape(case):
    """Tell whether TVM replaces the call by a reshape, where an extent of 0 means that of the
    source."""
    shape, _, axis, _ = case
    return 0 in shape and shape[0 if axis is None else axis] == 1


TAKES = takes().filter(lambda case: not looks_like_a_reshape(case))


@few
@given(TAKES)
def test_take(torch, case):
    check_many_against_torch([take_case(case)])


@pytest.mark.slow
@at_length(2000)
@given(batches(TAKES))
def test_take_at_length(torch, batch):
    check_many_against_torch(list(map(take_case, batch)), target=TARGET)


@few
@given(gathers())
def test_gather_elements(torch, case):
    check_many_against_torch([gather_elements_case(case)])


@pytest.mark.slow
@at_length(800)
@given(batches(gathers()))
def test_gather_elements_at_length(torch, batch):
    check_many_against_torch(list(map(gather_elements_case, batch)), target=TARGET)


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize(
    ("mode", "elements"),
    [
        ("fast", [None, None, 2, 0, None, None, 1]),
        ("nan", [None, None, None, 0, None, None, 1]),
        ("clip", [0, 0, 0, 0, 2, 2, 1]),
        ("wrap", [SMALLEST % 3, 2, 2, 0, 0, LARGEST % 3, 1]),
    ],
)
def test_indices_outside_of_the_axis(mode, elements, order):
    """An index without an element contributes nothing at any order, not even a NaN."""
    indices = np.array([SMALLEST, -4, -1, 0, 3, LARGEST, 1])
    x = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    inside = [k for k, where in enumerate(elements) if where is not None]

    def take(x, i):
        return relax.op.take(x, i, axis=0, mode=mode)

    result = value_of(take, [x, indices])
    expected = np.full((7, 2), np.nan)
    expected[inside] = x[[elements[k] for k in inside]]
    np.testing.assert_array_equal(result, expected)
    result, weight = gradient(take, [x, indices], order)
    if order == 1:
        expected = np.zeros((3, 2))
        np.add.at(expected, [elements[k] for k in inside], weight[inside])
    else:
        expected = np.zeros((7, 2))
        expected[inside] = weight[[elements[k] for k in inside]]
    np.testing.assert_allclose(result, expected, 1e-12)


@pytest.mark.parametrize("order", [1, 2])
def test_indices_of_gather_elements_outside_of_the_axis(order):
    indices = np.array([[SMALLEST, -4], [-1, 3], [LARGEST, 0], [1, 1]])
    elements = [[None, None], [2, None], [None, 0], [1, 1]]
    data = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])

    def gather(data, i):
        return relax.op.gather_elements(data, i, axis=0)

    result, expected = np.full((4, 2), np.nan), np.zeros((3, 2) if order == 1 else (4, 2))
    slope, weight = gradient(gather, [data, indices], order)
    for row, columns in enumerate(elements):
        for column, where in enumerate(columns):
            if where is not None:
                result[row, column] = data[where, column]
                if order == 1:
                    expected[where, column] += weight[row, column]
                else:
                    expected[row, column] = weight[where, column]
    np.testing.assert_array_equal(value_of(gather, [data, indices]), result)
    np.testing.assert_allclose(slope, expected, 1e-12)


def test_more_rows_of_indices_than_of_data():
    """PyTorch and ONNX refuse it, but TVM does not. Missing rows of the data are not read."""
    data, indices = np.array([[1.0, 2.0]]), np.array([[1], [0]])

    def gather(data, i):
        return relax.op.gather_elements(data, i, axis=1)

    np.testing.assert_array_equal(value_of(gather, [data, indices]), [[2.0], [np.nan]])
    slope, weight = gradient(gather, [data, indices])
    np.testing.assert_array_equal(slope, [[0, weight[0, 0]]])


@pytest.mark.parametrize("mode", ["fast", "clip", "wrap"])
def test_empty_axis(mode):
    """The axis has no elements, and no index causes a read."""
    x, indices = np.zeros((2, 0)), np.array([0, -1, 5])
    for symbolic in (None, {0: {1: "n"}}):
        value = value_of(
            lambda x, i: relax.op.take(x, i, axis=1, mode=mode), [x, indices], symbolic
        )
        np.testing.assert_array_equal(value, np.full((2, 3), np.nan))


def test_nan_of_integers_and_without_axis():
    """TVM's own lowering compiles neither case."""
    for x, outside in ((np.array([5, 6], "int32"), 0), (np.array([5.0, 6.0]), np.nan)):
        value = value_of(lambda x, i: relax.op.take(x, i, mode="nan"), [x, np.array([1, 2, -1])])
        np.testing.assert_array_equal(value, [6, outside, outside])


def test_an_index_that_is_a_parameter():
    x = relax.Var("x", relax.TensorType((2, 3), "float32"))
    index = relax.Var("i", tvm.ir.PrimType("int64"))
    bb = relax.BlockBuilder()
    with bb.function("main", [x, index]):
        with bb.dataflow():
            taken = bb.emit(relax.op.take(x, index, axis=1))
            loss = bb.emit_output(relax.op.sum(taken))
        bb.emit_func_output(loss)
    module = relax.transform.Gradient("main", [x])(bb.get())
    machine = relax.VirtualMachine(tvm.compile(module, TARGET), tvm.cpu())
    values = np.array([[1, 2, 3], [4, 5, 6]], "float32")
    for i, column in ((0, 0), (-1, 2), (3, None), (LARGEST, None)):
        loss, (slope,) = machine["main_adjoint"](tvm.runtime.tensor(values), i)
        expected = np.zeros((2, 3))
        if column is not None:
            expected[:, column] = 1
        np.testing.assert_array_equal(slope.numpy(), expected)
        np.testing.assert_array_equal(
            loss.numpy(), np.nan if column is None else values[:, column].sum()
        )


STOCK = {
    "constant": lambda x: relax.op.take(x, relax.const([0, 2]), axis=1),
    "scalar": lambda x: relax.op.take(x, relax.prim_value(2), axis=1),
    "clip": lambda x: relax.op.take(x, relax.const([0, 9]), axis=1, mode="clip"),
    "wrap": lambda x: relax.op.take(x, relax.const([0, 9]), axis=1, mode="wrap"),
    "nan": lambda x: relax.op.take(x, relax.const([0, 9]), axis=1, mode="nan"),
    "slice": lambda x: relax.op.strided_slice(x, [1], [-2], [3]),
}


@pytest.mark.parametrize("case", STOCK)
def test_correct_legalizations_of_tvm_are_kept(case):
    """Where no access can lie outside, the lowering is exactly TVM's own."""
    from tvm.relax.transform.legalize_ops import index as stock

    name = "relax.strided_slice" if case == "slice" else "relax.take"
    lowering = stock._strided_slice if case == "slice" else stock._take
    module = build(STOCK[case], [np.zeros((2, 3))])
    expected = relax.transform.LegalizeOps(customize_legalize_map={name: lowering})(module)
    tvm.ir.assert_structural_equal(relax.transform.LegalizeOps()(module), expected)


def test_third_order():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 4))

    def cube_of(function):
        def cube(x, *indices):
            y = function(x, *indices)
            return relax.op.multiply(y, relax.op.multiply(y, y))

        return cube

    indices = np.array([[1, -1], [1, 0]])
    take = cube_of(lambda x, i: relax.op.take(x, i, axis=1))
    check_gradients(take, [x, indices], order=3, symbolic={0: {0: "n"}})
    gather = cube_of(lambda x, i: relax.op.gather_elements(x, i, axis=1))
    check_gradients(gather, [x, np.array([[1, 1], [0, 3], [-1, 2]])], order=3)
    cut = cube_of(lambda x: relax.op.strided_slice(x, [1], [-1], [-9], [-2]))
    check_gradients(cut, [x], order=3, symbolic={0: {0: "n"}})


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_dtypes_that_repeat_an_index(dtype):
    x = np.random.default_rng(0).normal(size=(3, 4)).astype(dtype)
    indices = np.array([1, 1, 1, -2, 0])
    check_gradients("relax.take", [x, indices], axis=0, order=2)
    check_gradients("relax.gather_elements", [x[:, 0].copy(), indices], axis=0, order=2)


INDEX = np.array([0, 127, -128, -1, 90, 127], "int8")


@pytest.mark.parametrize(
    ("op", "inputs", "attrs"),
    [
        ("take", [(200, 2), INDEX], {"axis": 0, "mode": "fast"}),
        ("take", [(200, 2), INDEX], {"axis": 0, "mode": "wrap"}),
        ("take", [(200, 2), INDEX], {"axis": 0, "mode": "clip"}),
        ("gather_elements", [(200,), INDEX], {}),
        ("index_tensor", [(200,), (INDEX,)], {}),
        ("scatter_elements", [(200,), INDEX, (6,)], {"reduction": "mul"}),
        ("index_put", [(200,), (INDEX,), (6,)], {"accumulate": True}),
    ],
)
def test_an_axis_longer_than_its_indices_reach(op, inputs, attrs):
    """The extent overflows the dtype of the indices. In it, negative indices must not be counted
    from the end."""
    rng = np.random.default_rng(0)
    inputs = [
        rng.normal(size=operand) if type(operand[0]) is int else operand for operand in inputs
    ]
    check_gradients(f"relax.{op}", inputs, order=1, target=TARGET, **attrs)
