"""Gradients of joining and splitting: random cases, symbolic extents, counts of bindings, and
refusals."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from sweep import TARGET, at_length, batches
from tvm import relax, tirx
from tvm.relax.op import grad as backward

from relax_grad import GradientError
from relax_grad.testing import TorchCase, check_gradients, check_many_against_torch

FEW = settings(max_examples=10, deadline=None, derandomize=True)


def normal(*shape):
    return np.random.default_rng(0).normal(size=shape)


def split_case(extent, indices):
    """Return a case of split. Parts may be empty, overlap, and leave elements out, as NumPy's."""

    def parts(torch, x):
        ends = [min(index, extent) for index in indices] + [extent]
        return tuple(
            x[begin : max(begin, end)] for begin, end in zip([0, *ends], ends, strict=False)
        )

    return TorchCase("relax.split", [normal(extent, 2)], parts, {"indices_or_sections": indices})


def stack_case(shape, count, axis):
    axis = axis % (len(shape) + 1) - (axis % 2) * (len(shape) + 1)
    return TorchCase(
        "relax.stack",
        [tuple(normal(*shape) for _ in range(count))],
        lambda torch, tensors: torch.stack(tensors, axis),
        {"axis": axis},
    )


SPLITS = st.builds(
    split_case, st.integers(0, 5), st.lists(st.integers(0, 6), min_size=1, max_size=4)
)
SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)
STACKS = st.builds(stack_case, SHAPES, st.integers(1, 3), st.integers(0, 3))


@FEW
@given(SPLITS)
def test_split(torch, case):
    check_many_against_torch([case])


@FEW
@given(STACKS)
def test_stack(torch, case):
    check_many_against_torch([case])


@pytest.mark.slow
@at_length(200)
@given(batches(SPLITS))
def test_split_at_length(torch, batch):
    check_many_against_torch(batch, target=TARGET)


@pytest.mark.slow
@at_length(200)
@given(batches(STACKS))
def test_stack_at_length(torch, batch):
    check_many_against_torch(batch, target=TARGET)


def function(params, build):
    bb = relax.BlockBuilder()
    with bb.function("main", params):
        with bb.dataflow():
            out = bb.emit_output(build(bb))
        bb.emit_func_output(out)
    return bb.get()


def tensors(*shapes, dtype="float32"):
    return [relax.Var(f"x{i}", relax.TensorType(s, dtype)) for i, s in enumerate(shapes)]


@pytest.mark.parametrize("indices", [[3], [7], [1, 3], [3, 1], [0, 2, 2]])
@pytest.mark.parametrize("extent", [0, 2, 5])
def test_split_along_a_symbolic_axis(indices, extent):
    """One program for every extent: the parts and their gradient are NumPy's."""
    n = tirx.Var("n", "int64")
    params = tensors([n, 2])
    module = function(params, lambda bb: relax.op.split(params[0], indices))
    machine = relax.VirtualMachine(tvm.compile(module, target=TARGET), tvm.cpu())
    x = normal(extent, 2).astype("float32")
    results = [part.numpy() for part in machine["main"](tvm.runtime.tensor(x))]
    ends = [*indices, extent]
    expected = [x[a : max(a, b)] for a, b in zip([0, *ends], ends, strict=False)]
    for part, wanted in zip(results, expected, strict=True):
        np.testing.assert_array_equal(part, wanted)

    parts = module["main"].ret_ty.fields
    params = tensors([n, 2]) + [relax.Var(f"g{i}", part) for i, part in enumerate(parts)]
    module = function(
        params, lambda bb: backward.split_backward_x(params[1:], [n, 2], indices, axis=0)
    )
    machine = relax.VirtualMachine(tvm.compile(module, target=TARGET), tvm.cpu())
    values = [x, *(part + 1 for part in expected)]
    results = machine["main"](*map(tvm.runtime.tensor, values)).numpy()
    wanted = np.zeros_like(x)
    for begin, part in zip([0, *indices], expected, strict=True):
        wanted[begin : begin + len(part)] += part + 1
    np.testing.assert_allclose(results, wanted, rtol=1e-6)


@pytest.mark.parametrize("parts", [2, [0, 0]])
def test_split_of_nothing(parts):
    (x,) = tensors((0, 3))
    module = function([x], lambda bb: relax.op.split(x, parts))
    machine = relax.VirtualMachine(tvm.compile(module, target=TARGET), tvm.cpu())
    results = machine["main"](tvm.runtime.tensor(np.zeros((0, 3), "float32")))
    assert {part.shape for part in results} == {(0, 3)}


def ops_of_adjoint(module):
    bindings = relax.transform.Gradient("main")(module)["main_adjoint"].body.blocks[0].bindings
    return Counter(b.value.op.name for b in bindings if isinstance(b.value, relax.Call))


def test_bindings_of_many_parts():
    """A rule makes one call for all parts, whatever their number."""
    (x,) = tensors((64, 2))

    def through_split(bb):
        parts = bb.emit(relax.op.split(x, 64))
        total = None
        for i in range(64):
            part = bb.emit(relax.op.sum(bb.emit(relax.TupleGetItem(parts, i))))
            total = part if total is None else bb.emit(relax.op.add(total, part))
        return total

    assert ops_of_adjoint(function([x], through_split))["relax.concat"] == 1
    many = tensors(*[(2,)] * 64)
    stacked = function(many, lambda bb: relax.op.sum(bb.emit(relax.op.stack(many))))
    counts = ops_of_adjoint(stacked)
    assert counts["relax.grad.stack_backward_tensors"] == 1
    assert sum(counts.values()) < 8


def test_meshgrid_in_half_precision_does_not_saturate():
    """In float16, a sum of ones stops at 2048."""
    params = tensors((1,), (4096,), dtype="float16")

    def loss(bb):
        grids = bb.emit(relax.op.meshgrid(params))
        grid = bb.emit(relax.op.astype(bb.emit(relax.TupleGetItem(grids, 0)), "float32"))
        return relax.op.sum(grid)

    module = relax.transform.Gradient("main", params[:1])(function(params, loss))
    machine = relax.VirtualMachine(tvm.compile(module, target=TARGET), tvm.cpu())
    values = [np.zeros(1, "float16"), np.zeros(4096, "float16")]
    assert machine["main_adjoint"](*map(tvm.runtime.tensor, values))[1][0].numpy() == 4096


def test_a_tuple_that_is_a_variable():
    def forward(x):
        parts = relax.op.split(x, 2)
        return relax.op.multiply(relax.op.stack(parts, 1), relax.op.stack(parts, 1))

    check_gradients(forward, [normal(4, 2)], order=2)


def test_split_into_sections_that_do_not_fit():
    (x,) = tensors((5,))

    def forward(bb):
        parts = bb.emit(relax.op.split(x, 4))
        return relax.op.sum(bb.emit(relax.TupleGetItem(parts, 0)))

    with pytest.raises(GradientError, match=r"relax\.split.*\[2, 2, 2, -1\].*at indices"):
        relax.transform.Gradient("main")(function([x], forward))


def test_stack_of_tensors_that_may_differ():
    params = tensors([tirx.Var("n", "int64")], [tirx.Var("m", "int64")])
    module = function(params, lambda bb: relax.op.sum(bb.emit(relax.op.stack(params))))
    with pytest.raises(GradientError, match=r"relax\.stack.*shape.*must be known"):
        relax.transform.Gradient("main")(module)
