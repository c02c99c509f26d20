"""The tensor expressions of reads and writes at indices against loops over elements in Python."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import te

from relax_grad.topi import _places, index_nd, index_write

sys.path.insert(0, str(Path(__file__).parent))
from test_index import element_of, gather_pairs, index_arrays, run, shapes

COMBINE = {
    "update": lambda old, new: new,
    "add": lambda old, new: old + new,
    "mul": lambda old, new: old * new,
    "mean": lambda old, new: (old + new) / 2,
    "max": max,
    "min": min,
}
#: factor of what was there and of the update
LINEAR = {"update": (0, 1), "mean": (0.5, 0.5)}
INDEX_DTYPES = ("int64", "int32", "uint8", "uint64")

few = settings(max_examples=8, deadline=None, derandomize=True)
many = settings(max_examples=200, deadline=None)


def point_pairs(data_shape, points, batch_dims=0):
    """Yield the place in the result and the place in the data, or None, for points of integers."""
    count = points.shape[-1]
    behind = data_shape[batch_dims + count :]
    for point in np.ndindex(points.shape[:-1]):
        batch = point[:batch_dims]
        where = [
            element_of(int(index), size, "fast")
            for index, size in zip(points[point], data_shape[batch_dims:], strict=False)
        ]
        inside = None not in where and all(b < s for b, s in zip(batch, data_shape, strict=False))
        for rest in np.ndindex(*behind):
            yield (*point, *rest), (*batch, *where, *rest) if inside else None


def check_reads(data_shape, shape, indices, pairs, gather, add_up, dtype="float64", symbolic=False):
    rng = np.random.default_rng(0)
    data, grad = (rng.normal(size=size).astype(dtype) for size in (data_shape, shape))
    taken, with_zero = np.full(shape, np.nan, dtype), np.zeros(shape, dtype)
    expected = np.zeros(data_shape)
    for at, where in pairs:
        if where is not None:
            taken[at] = with_zero[at] = data[where]
            expected[where] += float(grad[at])
    for fill, wanted in (("nan", taken), ("zero", with_zero)):
        found = run(
            lambda a, *i, fill=fill: gather(a, i, fill), [data, *indices], shape, dtype, symbolic
        )
        np.testing.assert_array_equal(found, wanted)
    found = run(
        lambda dy, a, *i: add_up(dy, i, a.shape),
        [grad, data, *indices],
        data_shape,
        dtype,
        symbolic,
    )
    np.testing.assert_allclose(found, expected, *[1e-12 if dtype == "float64" else 1e-2] * 2)


def check_gather_nd(data_shape, points, batch_dims, dtype="float64"):
    shape = (*points.shape[:-1], *data_shape[batch_dims + points.shape[-1] :])
    check_reads(
        data_shape,
        shape,
        [points],
        point_pairs(data_shape, points, batch_dims),
        lambda a, i, fill: index_nd.gather_nd(a, *i, batch_dims, fill),
        lambda dy, i, s: index_nd.gather_nd_backward_data(dy, *i, s, batch_dims),
        dtype,
    )


def check_index_tensor(data_shape, indices, dtype="float64"):
    points = np.stack(np.broadcast_arrays(*(index.astype(object) for index in indices)), -1)
    check_reads(
        data_shape,
        (*points.shape[:-1], *data_shape[len(indices) :]),
        indices,
        point_pairs(data_shape, points),
        index_nd.index_tensor,
        index_nd.index_tensor_backward_data,
        dtype,
    )


def check_writes(data, updates, indices, pairs, reduction, write, backward, symbolic=False):
    """Forward, and the gradient with respect to updates of the reductions that have an operator."""
    pairs = list(pairs)
    expected = data.copy()
    for at, where in pairs:
        if where is not None:
            expected[where] = COMBINE[reduction](expected[where], updates[at])
    dtype = str(data.dtype)
    found = run(write, [data, *indices, updates], data.shape, dtype, symbolic)
    np.testing.assert_allclose(found, expected, 1e-12)
    if backward is None or reduction not in LINEAR:
        return
    grad = np.random.default_rng(1).normal(size=data.shape)
    expected, state = np.zeros(updates.shape), grad.copy()
    factor, weight = LINEAR[reduction]
    for at, where in reversed(pairs):
        if where is not None:
            expected[at] = weight * state[where]
            state[where] *= factor
    found = run(backward, [grad, *indices], updates.shape, dtype, symbolic)
    np.testing.assert_allclose(found, expected, 1e-12)


def check_scatter_elements(data_shape, indices, axis, reduction, symbolic=False):
    rng = np.random.default_rng(0)
    check_writes(
        rng.normal(size=data_shape),
        rng.normal(size=indices.shape),
        [indices],
        gather_pairs(data_shape, indices, axis % len(data_shape)),
        reduction,
        lambda d, i, u: index_write.scatter_elements(d, i, u, axis, reduction),
        lambda dy, i: index_write.scatter_elements_backward_updates(dy, i, axis, reduction),
        symbolic,
    )


def check_scatter_nd(data_shape, points, reduction):
    rng = np.random.default_rng(0)
    shape = (*points.shape[:-1], *data_shape[points.shape[-1] :])
    check_writes(
        rng.normal(size=data_shape),
        rng.normal(size=shape),
        [points],
        point_pairs(data_shape, points),
        reduction,
        lambda d, i, u: index_write.scatter_nd(d, i, u, reduction),
        index_write.scatter_nd_backward_updates,
    )


def check_index_put(data_shape, indices, accumulate):
    rng = np.random.default_rng(0)
    points = np.stack(np.broadcast_arrays(*(index.astype(object) for index in indices)), -1)
    check_writes(
        rng.normal(size=data_shape),
        rng.normal(size=points.shape[:-1]),
        indices,
        point_pairs(data_shape, points),
        "add" if accumulate else "update",
        lambda d, *iu: index_write.index_put(d, iu[:-1], iu[-1], accumulate),
        lambda dy, *i: index_write.index_put_backward_values(dy, i),
    )


def check_scan(data_shape, indices, axis, reverse):
    rng = np.random.default_rng(0)
    start, a, b = (rng.normal(size=s) for s in (data_shape, indices.shape, indices.shape))
    pairs = list(gather_pairs(data_shape, indices, axis % len(data_shape)))
    for terms in (None, b):
        state, expected = start.copy(), np.zeros(indices.shape)
        for at, where in reversed(pairs) if reverse else pairs:
            if where is not None:
                expected[at] = state[where]
                state[where] = a[at] * state[where] + (0 if terms is None else terms[at])
        found = run(
            lambda s, i, a, *t: index_write.scatter_elements_scan(
                s, i, a, t[0] if t else None, axis, reverse
            ),
            [start, indices, a, *([] if terms is None else [terms])],
            indices.shape,
            "float64",
        )
        np.testing.assert_allclose(found, expected, 1e-12)


@st.composite
def elements(draw):
    data_shape = draw(shapes(min_rank=1))
    axis = draw(st.integers(-len(data_shape), len(data_shape) - 1))
    shape = draw(st.tuples(*(st.integers(0, 5) for _ in data_shape)))
    return data_shape, draw(index_arrays(shape, data_shape[axis], INDEX_DTYPES)), axis


@st.composite
def points(draw, batched=False):
    data_shape = draw(shapes(min_rank=1))
    count = draw(st.integers(1, len(data_shape)))
    batch_dims = draw(st.integers(0, len(data_shape) - count)) if batched else 0
    batch = tuple(draw(st.integers(1, 4)) for _ in range(batch_dims))
    shape = (*batch, *draw(shapes(max_rank=2)), count)
    return data_shape, draw(index_arrays(shape, max(data_shape), INDEX_DTYPES)), batch_dims


@st.composite
def tensors(draw, all_axes=False):
    data_shape = draw(shapes(min_rank=1))
    count = len(data_shape) if all_axes else draw(st.integers(1, len(data_shape)))
    common = draw(shapes(max_rank=2))
    indices = []
    for size in data_shape[:count]:
        own = common[draw(st.integers(0, len(common))) :]
        own = tuple(1 if draw(st.booleans()) else extent for extent in own)
        indices.append(draw(index_arrays(own, size, INDEX_DTYPES)))
    return data_shape, indices


@few
@given(points(batched=True))
def test_gather_nd(case):
    check_gather_nd(*case)


@few
@given(tensors())
def test_index_tensor(case):
    check_index_tensor(*case)


@pytest.mark.parametrize("reduction", COMBINE)
@pytest.mark.parametrize("symbolic", [False, True])
@settings(max_examples=5, deadline=None, derandomize=True)
@given(case=elements())
def test_scatter_elements(case, reduction, symbolic):
    check_scatter_elements(*case, reduction, symbolic)


@few
@given(points(), st.sampled_from([r for r in COMBINE if r != "mean"]))
def test_scatter_nd(case, reduction):
    check_scatter_nd(*case[:2], reduction)


@few
@given(tensors(all_axes=True), st.booleans())
def test_index_put(case, accumulate):
    check_index_put(*case, accumulate)


@few
@given(elements(), st.booleans())
def test_scan(case, reverse):
    check_scan(*case, reverse)


@pytest.mark.slow
@many
@given(points(batched=True), tensors(), st.sampled_from(["float64", "float32", "float16"]))
def test_many_reads(nd, tensor, dtype):
    check_gather_nd(*nd, dtype)
    check_index_tensor(*tensor, dtype)


@pytest.mark.slow
@many
@given(elements(), points(), tensors(all_axes=True), st.booleans(), st.sampled_from(list(COMBINE)))
def test_many_writes(element, nd, tensor, flag, reduction):
    check_scatter_elements(*element, reduction, flag)
    check_scatter_nd(*nd[:2], "add" if reduction == "mean" else reduction)
    check_index_put(*tensor, flag)
    check_scan(*element, flag)


@pytest.mark.parametrize("behind", [(1,), (63,), (64,), (65,), (3, 50), (2, 0)], ids=str)
def test_pieces_of_the_axes_behind(behind):
    """They are divided among parallel tasks, whatever their extents."""
    check_scatter_nd((3, *behind), np.array([[2], [-1], [0], [3]]), "update")
    indices = np.random.default_rng(0).integers(-4, 4, (2, 4, *behind))
    check_scatter_elements((2, 3, *behind), indices, 1, "mean")


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
    found = run(
        lambda d, s: index_write.slice_scatter(d, s, start, step, -1),
        [data, src],
        data.shape,
        "float64",
        symbolic,
    )
    np.testing.assert_array_equal(found, expected)
    found = run(
        lambda dy, s: index_write.slice_scatter_backward_src(dy, s.shape, start, step, -1),
        [data, src],
        src.shape,
        "float64",
        symbolic,
    )
    np.testing.assert_array_equal(found, gradient)


def test_half_precision_accumulates_in_float32():
    """The sum of 4096 ones, in float16 itself, would stop at 2048, and their product of 1 + 2**-11 at 1."""
    ones, indices = np.ones(4096, "float16"), np.zeros(4096, "int32")
    data = np.zeros(2, "float16")
    for found in (
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
        np.testing.assert_array_equal(found, [4096, 0])
    # 4096 halves of 2**-14, which float16 does not hold, are 0; 2**14 and back is not.
    factors = np.array([2.0**-14, 2.0**-14, 2.0**14, 2.0**14], "float16")
    found = run(
        lambda d, i, u: index_write.scatter_elements(d, i, u, 0, "mul"),
        [np.ones(1, "float16"), np.zeros(4, "int64"), factors],
        (1,),
        "float16",
    )
    np.testing.assert_array_equal(found, [1])


def test_broadcast_shape():
    shape = _places.broadcast_shape([(3, 1), (2,), (1, 1, 1)])
    assert [int(extent) for extent in shape] == [1, 3, 2]
    n, m = (te.var(name, "int64") for name in "nm")
    assert _places.broadcast_shape([(n, 1), (1, n)])[0].same_as(n)
    with pytest.raises(ValueError, match="cannot be broadcast"):
        _places.broadcast_shape([(n,), (m,)])
    with pytest.raises(ValueError, match="cannot be broadcast"):
        _places.broadcast_shape([(3,), (2,)])
