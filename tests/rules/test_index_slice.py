"""Gradients of slices, and their forward results."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import build
from sweep import TARGET, at_length, batches
from tvm import relax, tirx

from relax_grad import GradientError
from relax_grad.testing import (
    TorchCase,
    _program,
    check_gradients,
    check_many_against_torch,
)

SMALLEST, LARGEST = np.iinfo("int64").min, np.iinfo("int64").max
few = settings(max_examples=8, deadline=None, derandomize=True)


@st.composite
def slices(draw):
    """Draw slices of some axes in any order. TVM infers an extent for them: no slice ends before it
    begins."""
    shape = tuple(draw(st.lists(st.integers(0, 6), min_size=1, max_size=3)))
    rank = len(shape)
    chosen = draw(st.permutations(range(rank)))[: draw(st.integers(0, rank))]
    # Not the largest int64: TVM's type inference would overflow with a symbolic extent.
    bound = st.one_of(st.integers(-8, 8), st.sampled_from([-(2**40), 2**31 - 1, 2**62]))
    axes, bounds = [], []
    for axis in chosen:
        begin, end = draw(bound), draw(bound)
        step = draw(st.integers(1, 3)) * draw(st.sampled_from([1, -1]))
        first, last, _ = slice(begin, end, step).indices(shape[axis])
        if (last - first) * step < 0:
            begin, end = end, begin
            first, last, _ = slice(begin, end, step).indices(shape[axis])
        if (last - first) * step < 0:
            continue
        if first == last and 0 in shape and shape[axis]:
            continue  # TVM confuses empty tensors, as in looks_like_a_reshape
        axes.append(axis - rank if draw(st.booleans()) else axis)
        bounds.append([begin, end, step])
    return shape, axes, *([list(kind) for kind in zip(*bounds, strict=True)] or [[], [], []])


def slice_case(case, symbolic):
    shape, axes, begin, end, strides = case
    # The check of a gradient broadcasts. There, TVM does not always find the extent of a sliced
    # symbolic axis equal to itself.
    sliced = {axis % len(shape) for axis in axes}
    names = {axis: f"n{axis}" for axis in range(len(shape)) if axis not in sliced}
    return TorchCase(
        "relax.strided_slice",
        [np.random.default_rng(0).normal(size=shape)],
        lambda torch, x: sliced_by_torch(torch, x, axes, begin, end, strides),
        {"axes": axes, "begin": begin, "end": end, "strides": strides},
        symbolic={0: names} if symbolic else {},
    )


def sliced_by_torch(torch, x, axes, begin, end, strides):
    for axis, bounds in zip(axes, zip(begin, end, strides, strict=True), strict=True):
        taken = list(range(x.shape[axis]))[slice(*bounds)]
        x = x.index_select(axis, torch.tensor(taken, dtype=torch.long))
    return x


@few
@given(slices(), st.booleans())
def test_strided_slice(torch, case, symbolic):
    check_many_against_torch([slice_case(case, symbolic)])


@few
@given(slices(), st.booleans())
def test_value_of_strided_slice(torch, case, symbolic):
    shape, *bounds = case
    x = np.random.default_rng(0).normal(size=shape)
    names = {0: {axis: f"n{axis}" for axis in range(len(shape))}} if symbolic else {}
    (argument,) = _program.make_arguments([x], None, names)
    param = relax.Var(argument.name, argument.type)
    module = build([param], lambda bb, x: relax.op.strided_slice(x, *bounds))
    value = _program.compile_module(module, TARGET)("main", [x])
    expected = sliced_by_torch(torch, torch.from_numpy(x), *bounds)
    np.testing.assert_array_equal(value, expected.numpy())


@pytest.mark.slow
@at_length(700)
@given(batches(st.tuples(slices(), st.booleans())))
def test_strided_slice_at_length(torch, batch):
    check_many_against_torch([slice_case(*case) for case in batch], target=TARGET)


@st.composite
def dynamic_slices(draw):
    """Draw a shape, and a slice of each of its axes with bounds inside, near and far outside."""
    shape = tuple(draw(st.lists(st.integers(0, 6), min_size=1, max_size=3)))
    bound = st.one_of(st.integers(-8, 8), st.sampled_from([SMALLEST, SMALLEST + 1, LARGEST]))
    step = st.one_of(st.integers(1, 4), st.integers(-4, -1), st.sampled_from([LARGEST, SMALLEST]))
    return shape, [[draw(kind) for _ in shape] for kind in (bound, bound, step)]


def dynamic_slice_case(case):
    """Return the case of a sum of a slice: TVM infers no shape of the slice, and compiles little
    beyond its sum."""
    shape, bounds = case

    def total(x, weights, *bounds):
        y = relax.op.multiply(x, weights)
        return relax.op.sum(relax.op.dynamic_strided_slice(y, *bounds))

    return TorchCase(
        total,
        [*np.random.default_rng(0).normal(size=(2, *shape)), *map(np.array, bounds)],
        lambda torch, x, w, *_: sliced_by_torch(torch, x * w, range(len(shape)), *bounds).sum(),
    )


@settings(max_examples=2, deadline=None, derandomize=True)
@given(batches(dynamic_slices(), 4))
def test_random_dynamic_strided_slice(torch, batch):
    check_many_against_torch(list(map(dynamic_slice_case, batch)), target=TARGET)


@pytest.mark.slow
@at_length(300)
@given(batches(dynamic_slices()))
def test_dynamic_strided_slice_at_length(torch, batch):
    check_many_against_torch(list(map(dynamic_slice_case, batch)), target=TARGET)


def test_slice_of_unknown_bounds_is_refused():
    """TVM cannot compile it either."""
    x = relax.Var("x", relax.TensorType((4,), "float32"))
    bounds = relax.Var("b", relax.TupleType([tvm.ir.PrimType("int64")]))
    zero, first = relax.Tuple([relax.prim_value(0)]), relax.Tuple([relax.prim_value(1)])
    bb = relax.BlockBuilder()
    with bb.function("main", [x, bounds]):
        with bb.dataflow():
            part = bb.emit(relax.op.strided_slice(x, zero, zero, bounds, first))
            loss = bb.emit_output(relax.op.sum(part))
        bb.emit_func_output(loss)
    with pytest.raises(GradientError, match=r"relax.strided_slice.*'lv'.*written out as tuples"):
        relax.transform.Gradient("main", [x])(bb.get())


def test_inbound_backwards_is_refused():
    """TVM infers an extent that is too long: R.Tensor((4,)) for the three elements 6, 4 and 2."""

    def cut(x):
        return relax.op.strided_slice(x, [0], [6], [0], [-2], assume_inbound=True)

    with pytest.raises(
        GradientError, match=r"relax.strided_slice.*negative stride with assume_inbound"
    ):
        check_gradients(cut, [np.zeros(7)])


def dynamic_gradient(shape, begin, end, strides, symbolic=None):
    x = np.random.default_rng(0).normal(size=shape)
    bounds = [np.array(bound, "int64") for bound in (begin, end, strides)]

    def total(x, *bounds):
        return relax.op.sum(relax.op.dynamic_strided_slice(x, *bounds))

    arguments = _program.make_arguments([x, *bounds], None, symbolic or {})
    program = _program.first_order(total, arguments, {}, np.random.default_rng(0))
    differentiated = _program.differentiate(program, ["x0"])
    run = _program.compile_module(differentiated, TARGET)
    loss, (slope,) = run("main_adjoint", program.values())
    weight = float(program.arguments[-1].value)
    taken = tuple(slice(*bound) for bound in zip(begin, end, strides, strict=True))
    expected = np.zeros(shape)
    expected[taken] = weight
    np.testing.assert_allclose(slope, expected, 1e-12)
    if x[taken].size:  # TVM does not write the sum of an empty tensor
        np.testing.assert_allclose(loss, x[taken].sum() * weight, 1e-12)


@pytest.mark.parametrize("symbolic", [None, {0: {0: "n", 1: "m"}}])
@pytest.mark.parametrize(
    ("begin", "end", "strides"),
    [
        ([0, 1], [4, 5], [1, 2]),
        ([-3, -1], [-1, SMALLEST], [1, -2]),
        ([SMALLEST, LARGEST], [LARGEST, SMALLEST], [LARGEST, SMALLEST]),
        ([3, 0], [1, 5], [1, 1]),
    ],
)
def test_dynamic_strided_slice(begin, end, strides, symbolic):
    dynamic_gradient((4, 5), begin, end, strides, symbolic)


def test_dynamic_strided_slice_of_constants():
    """The bounds are constants, but the shape of the result is still computed at run time."""

    def cubes(x):
        bounds = (relax.const(v, "int64") for v in ([-3, 0], [4, 5], [1, 2]))
        cubes = relax.op.multiply(x, relax.op.multiply(x, x))
        return relax.op.sum(relax.op.dynamic_strided_slice(cubes, *bounds))

    check_gradients(cubes, [np.random.default_rng(0).normal(size=(4, 5))])


def test_forward_of_a_symbolic_slice():
    """A negative begin counts from the end and a negative axis from the last, in every release of
    TVM."""
    x = np.arange(20.0).reshape(4, 5)
    n = tirx.Var("n", "int64")
    param = relax.Var("x", relax.TensorType((n, 5), "float64"))
    for axes, begin, end, strides, expected in (
        ([-1], [-2], [LARGEST], [1], x[:, -2:]),
        ([0, -1], [-3, 9], [-1, -9], [2, -3], x[-3:-1:2, 9:-9:-3]),
        ([0], [n - 1], [n], [1], x[3:4]),
    ):
        bb = relax.BlockBuilder()
        with bb.function("main", [param]):
            result = bb.emit(relax.op.strided_slice(param, axes, begin, end, strides))
            bb.emit_func_output(result)
        value = _program.compile_module(bb.get(), TARGET)("main", [x])
        np.testing.assert_array_equal(value, expected)
