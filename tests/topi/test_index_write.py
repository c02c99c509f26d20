"""The tensor expressions of reads and writes at indices against loops over elements in Python."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from indices import (
    elements,
    expected_reads,
    gather_pairs,
    point_pairs,
    points,
    points_of,
    tensors,
)
from kernels import Kernel, check_kernels, run
from sweep import TARGET, at_length, batches
from tvm import te

from relax_grad.topi import _scatter, index_nd, index_write

COMBINE = {
    "update": lambda old, new: new,
    "add": lambda old, new: old + new,
    "mul": lambda old, new: old * new,
    "mean": lambda old, new: (old + new) / 2,
    "max": max,
    "min": min,
}
#: For each linear reduction, the factors of the old value and of the update.
LINEAR = {"update": (0, 1), "mean": (0.5, 0.5)}

few = settings(max_examples=8, deadline=None, derandomize=True)


def read_kernels(
    data_shape, shape, indices, pairs, gather, add_up, dtype="float64", symbolic=False
):
    data = np.random.default_rng(0).normal(size=data_shape).astype(dtype)
    taken, grad, expected = expected_reads(pairs, data, shape, dtype)
    for fill, wanted in taken.items():
        yield Kernel(
            lambda a, *i, fill=fill: gather(a, i, fill),
            [data, *indices],
            wanted,
            dtype,
            symbolic=symbolic,
        )
    yield Kernel(
        lambda dy, a, *i: add_up(dy, i, a.shape),
        [grad, data, *indices],
        expected,
        dtype,
        1e-12 if dtype == "float64" else 1e-2,
        symbolic,
    )


def gather_nd_kernels(data_shape, points, batch_dims, dtype="float64"):
    shape = (*points.shape[:-1], *data_shape[batch_dims + points.shape[-1] :])
    return read_kernels(
        data_shape,
        shape,
        [points],
        point_pairs(data_shape, points, batch_dims),
        lambda a, i, fill: index_nd.gather_nd(a, *i, batch_dims, fill),
        lambda dy, i, s: index_nd.gather_nd_backward_data(dy, *i, s, batch_dims),
        dtype,
    )


def index_tensor_kernels(data_shape, indices, dtype="float64"):
    points = points_of(indices)
    return read_kernels(
        data_shape,
        (*points.shape[:-1], *data_shape[len(indices) :]),
        indices,
        point_pairs(data_shape, points),
        index_nd.index_tensor,
        index_nd.index_tensor_backward_data,
        dtype,
    )


def write_kernels(data, updates, indices, pairs, reduction, write, backward, symbolic=False):
    """Yield the forward kernel and, for linear reductions, the kernel of the gradient of the
    updates."""
    pairs = list(pairs)
    expected = data.copy()
    for at, where in pairs:
        if where is not None:
            expected[where] = COMBINE[reduction](expected[where], updates[at])
    yield Kernel(write, [data, *indices, updates], expected, tolerance=1e-12, symbolic=symbolic)
    if reduction not in LINEAR:
        return
    grad = np.random.default_rng(1).normal(size=data.shape)
    expected, state = np.zeros(updates.shape), grad.copy()
    factor, weight = LINEAR[reduction]
    for at, where in reversed(pairs):
        if where is not None:
            expected[at] = weight * state[where]
            state[where] *= factor
    yield Kernel(backward, [grad, *indices], expected, tolerance=1e-12, symbolic=symbolic)


def scatter_elements_kernels(data_shape, indices, axis, reduction, symbolic=False):
    rng = np.random.default_rng(0)
    return write_kernels(
        rng.normal(size=data_shape),
        rng.normal(size=indices.shape),
        [indices],
        gather_pairs(data_shape, indices, axis % len(data_shape)),
        reduction,
        lambda d, i, u: index_write.scatter_elements(d, i, u, axis, reduction),
        lambda dy, i: index_write.scatter_elements_backward_updates(dy, i, axis, reduction),
        symbolic,
    )


def scatter_nd_kernels(data_shape, points, reduction):
    rng = np.random.default_rng(0)
    shape = (*points.shape[:-1], *data_shape[points.shape[-1] :])
    return write_kernels(
        rng.normal(size=data_shape),
        rng.normal(size=shape),
        [points],
        point_pairs(data_shape, points),
        reduction,
        lambda d, i, u: index_write.scatter_nd(d, i, u, reduction),
        index_write.scatter_nd_backward_updates,
    )


def index_put_kernels(data_shape, indices, accumulate):
    rng = np.random.default_rng(0)
    points = points_of(indices)
    return write_kernels(
        rng.normal(size=data_shape),
        rng.normal(size=points.shape[:-1]),
        indices,
        point_pairs(data_shape, points),
        "add" if accumulate else "update",
        lambda d, *iu: index_write.index_put(d, iu[:-1], iu[-1], accumulate),
        lambda dy, *i: index_write.index_put_backward_values(dy, i),
    )


def scan_kernels(data_shape, indices, axis, reverse):
    rng = np.random.default_rng(0)
    start, a, b = (rng.normal(size=s) for s in (data_shape, indices.shape, indices.shape))
    pairs = list(gather_pairs(data_shape, indices, axis % len(data_shape)))
    for terms in (None, b):
        state, expected = start.copy(), np.zeros(indices.shape)
        for at, where in reversed(pairs) if reverse else pairs:
            if where is not None:
                expected[at] = state[where]
                state[where] = a[at] * state[where] + (0 if terms is None else terms[at])
        yield Kernel(
            lambda s, i, a, t: index_write.scatter_elements_scan(s, i, a, t, axis, reverse),
            [start, indices, a, terms],
            expected,
            tolerance=1e-12,
        )


@few
@given(points(batched=True))
def test_gather_nd(case):
    check_kernels(gather_nd_kernels(*case))


@few
@given(tensors())
def test_index_tensor(case):
    check_kernels(index_tensor_kernels(*case))


@pytest.mark.parametrize("reduction", COMBINE)
@pytest.mark.parametrize("symbolic", [False, True])
@settings(max_examples=5, deadline=None, derandomize=True)
@given(case=elements())
def test_scatter_elements(case, reduction, symbolic):
    check_kernels(scatter_elements_kernels(*case, reduction, symbolic))


@few
@given(points(), st.sampled_from([r for r in COMBINE if r != "mean"]))
def test_scatter_nd(case, reduction):
    check_kernels(scatter_nd_kernels(*case[:2], reduction))


@few
@given(tensors(all_axes=True), st.booleans())
def test_index_put(case, accumulate):
    check_kernels(index_put_kernels(*case, accumulate))


@few
@given(elements(), st.booleans())
def test_scan(case, reverse):
    check_kernels(scan_kernels(*case, reverse))


@pytest.mark.slow
@at_length(200)
@given(
    batches(st.tuples(points(batched=True), tensors())),
    st.sampled_from(["float64", "float32", "float16"]),
)
def test_reads_at_length(batch, dtype):
    kernels = (
        (*gather_nd_kernels(*nd, dtype), *index_tensor_kernels(*tensor, dtype))
        for nd, tensor in batch
    )
    check_kernels(itertools.chain.from_iterable(kernels), TARGET)


@pytest.mark.slow
@at_length(200)
@given(
    batches(st.tuples(elements(), points(), tensors(all_axes=True), st.sampled_from([*COMBINE]))),
    st.booleans(),
)
def test_writes_at_length(batch, flag):
    kernels = (
        (
            *scatter_elements_kernels(*element, reduction, flag),
            *scatter_nd_kernels(*nd[:2], "add" if reduction == "mean" else reduction),
            *index_put_kernels(*tensor, flag),
            *scan_kernels(*element, flag),
        )
        for element, nd, tensor, reduction in batch
    )
    check_kernels(itertools.chain.from_iterable(kernels), TARGET)


@pytest.mark.parametrize("behind", [(1,), (63,), (64,), (65,), (3, 50), (2, 0)], ids=str)
def test_pieces_of_the_axes_behind(behind):
    """The trailing axes are divided among parallel tasks, for any extents."""
    check_kernels(scatter_nd_kernels((3, *behind), np.array([[2], [-1], [0], [3]]), "update"))
    indices = np.random.default_rng(0).integers(-4, 4, (2, 4, *behind))
    check_kernels(scatter_elements_kernels((2, 3, *behind), indices, 1, "mean"))


@pytest.mark.parametrize(
    ("start", "step", "count"), [(0, 1, 5), (1, 2, 2), (-3, 2, 5), (4, 1, 3), (7, 1, 2), (-9, 1, 2)]
)
@pytest.mark.parametrize("symbolic", [False, True])
def test_slice_scatter(start, step, count, symbolic):
    rng = np.random.default_rng(0)
    data, src = rng.normal(size=(3, 5)), rng.normal(size=(3, count))
    expected, gradient = data.copy(), np.zeros(src.shape)
    for k in range(count):
        if 0 <= start + k * step < 5:
            expected[:, start + k * step] = src[:, k]
            gradient[:, k] = data[:, start + k * step]
    result = run(
        lambda d, s: index_write.slice_scatter(d, s, start, step, -1),
        [data, src],
        data.shape,
        "float64",
        symbolic,
    )
    np.testing.assert_array_equal(result, expected)
    result = run(
        lambda dy, s: index_write.slice_scatter_backward_src(dy, s.shape, start, step, -1),
        [data, src],
        src.shape,
        "float64",
        symbolic,
    )
    np.testing.assert_array_equal(result, gradient)


def test_half_precision_accumulates_in_float32():
    """In float16, a sum of ones would stop at 2048."""
    ones, indices = np.ones(4096, "float16"), np.zeros(4096, "int32")
    data = np.zeros(2, "float16")
    for result in (
        run(
            lambda d, i, u: index_write.scatter_elements(d, i, u, 0, "add"),
            [data, indices, ones],
            (2,),
            "float16",
        ),
        run(
            lambda d, i, u: index_write.index_put(d, [i], u, True),
            [data, indices, ones],
            (2,),
            "float16",
        ),
        run(
            lambda dy, i: index_nd.gather_nd_backward_data(dy, i, (2,), 0),
            [ones, indices.reshape(-1, 1)],
            (2,),
            "float16",
        ),
    ):
        np.testing.assert_array_equal(result, [4096, 0])
    # In float16 the first two factors would underflow to 0; in float32 the product is 1.
    factors = np.array([2.0**-14, 2.0**-14, 2.0**14, 2.0**14], "float16")
    result = run(
        lambda d, i, u: index_write.scatter_elements(d, i, u, 0, "mul"),
        [np.ones(1, "float16"), np.zeros(4, "int64"), factors],
        (1,),
        "float16",
    )
    np.testing.assert_array_equal(result, [1])


def test_broadcast_shape():
    shape = _scatter.broadcast_shape([(3, 1), (2,), (1, 1, 1)])
    assert [int(extent) for extent in shape] == [1, 3, 2]
    n, m = (te.var(name, "int64") for name in "nm")
    assert _scatter.broadcast_shape([(n, 1), (1, n)])[0].same_as(n)
    with pytest.raises(ValueError, match="cannot be broadcast"):
        _scatter.broadcast_shape([(n,), (m,)])
    with pytest.raises(ValueError, match="cannot be broadcast"):
        _scatter.broadcast_shape([(3,), (2,)])
