"""Random indices, and their meaning in Python integers, for tests of operators with index
operands."""

from __future__ import annotations

import functools
import math

import numpy as np
from hypothesis import strategies as st

MODES = ("fast", "clip", "wrap", "nan")
INDEX_DTYPES = ("int64", "int32", "int8", "uint8", "uint32", "uint64")


def element_of(index: int, size: int, mode: str) -> int | None:
    """Return the element that an index selects, or None for an index out of bounds."""
    if mode == "clip" and size:
        return min(max(index, 0), size - 1)
    if mode == "wrap" and size:
        return index % size
    if mode == "fast" and index < 0:
        index += size
    return index if 0 <= index < size else None


def take_pairs(x_shape, indices, axis, mode):
    """Yield for each taken element its place in the result and its place in the data, or None."""
    for at in np.ndindex(*x_shape[:axis], *indices.shape, *x_shape[axis + 1 :]):
        behind = axis + indices.ndim
        where = element_of(int(indices[at[axis:behind]]), x_shape[axis], mode)
        yield at, None if where is None else (*at[:axis], where, *at[behind:])


def gather_pairs(data_shape, indices, axis):
    """Yield the same pairs for gather_elements."""
    for at in np.ndindex(*indices.shape):
        where = element_of(int(indices[at]), data_shape[axis], "fast")
        others = (
            a < size for i, (a, size) in enumerate(zip(at, data_shape, strict=True)) if i != axis
        )
        inside = where is not None and all(others)
        yield at, (*at[:axis], where, *at[axis + 1 :]) if inside else None


def point_pairs(data_shape, points, batch_dims=0):
    """Yield the place in the result and the place in the data, or None, for integer points."""
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


def points_of(indices):
    """Return the points whose coordinates are the broadcast index arrays."""
    return np.stack(np.broadcast_arrays(*(index.astype(object) for index in indices)), -1)


def expected_reads(pairs, data, shape, dtype):
    """Return the data read at pairs, with NaN and with 0 for missing places, a random output
    gradient, and the expected data gradient."""
    grad = np.random.default_rng(1).normal(size=shape).astype(dtype)
    taken, with_zero = np.full(shape, np.nan, dtype), np.zeros(shape, dtype)
    expected = np.zeros(data.shape)
    for at, where in pairs:
        if where is not None:
            taken[at] = with_zero[at] = data[where]
            expected[where] += float(grad[at])
    return {"nan": taken, "zero": with_zero}, grad, expected


def read_with_torch(pairs, shape):
    """Return a PyTorch function that reads the elements of pairs, and NaN where there is no
    place."""
    pairs = list(pairs)

    def read(torch, x, *_):
        nothing = x.sum() * 0 + torch.nan
        elements = [nothing if where is None else x[where] for _, where in pairs]
        return torch.stack(elements).reshape(shape) if elements else x.new_zeros(shape) + nothing

    return read


def write_with_torch(pairs, reduction):
    """Return a PyTorch function that writes updates at the places of pairs, one after the other.

    The gradient of an extremum is shared evenly among ties, as in PyTorch's ``amax``.
    """
    pairs = list(pairs)

    def write(torch, data, *others):
        updates = others[-1]
        if not data.numel():
            return data * 1
        written = {where: [data[where]] for where in np.ndindex(*data.shape)}
        for at, where in pairs:
            if where is not None:
                written[where].append(updates[at])
        elements = [_COMBINED[reduction](torch, values) for values in written.values()]
        return torch.stack(elements).reshape(data.shape)

    return write


_COMBINED = {
    "update": lambda torch, values: values[-1],
    "add": lambda torch, values: sum(values),
    "mul": lambda torch, values: math.prod(values),
    "mean": lambda torch, values: functools.reduce(lambda old, new: (old + new) / 2, values),
    "max": lambda torch, values: torch.stack(values).amax(),
    "min": lambda torch, values: torch.stack(values).amin(),
}


def shapes(min_rank=0, max_rank=3, min_side=0):
    return st.lists(st.integers(min_side, 4), min_size=min_rank, max_size=max_rank).map(tuple)


@st.composite
def index_arrays(draw, shape, size, dtypes=INDEX_DTYPES):
    """Draw indices inside, near and far outside an axis, as far as their dtype allows."""
    dtype = draw(st.sampled_from(dtypes))
    limits = np.iinfo(dtype)
    low, high = int(limits.min), int(limits.max)
    # Drawing each element would exceed Hypothesis' limit of random data for a list of cases.
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    reach = draw(st.sampled_from([size - 1, size, 2 * size + 2]))
    near = rng.integers(max(low, -reach - 1), min(high, max(reach, 0)), shape, dtype, endpoint=True)
    far = rng.choice(np.array([low, low + 1, high - 1, high], dtype), shape)
    return np.where(rng.random(shape) < draw(st.sampled_from([0, 0.3])), far, near)


@st.composite
def takes(draw):
    x_shape = draw(shapes(min_rank=1))
    rank = len(x_shape)
    axis = draw(st.integers(-rank, rank - 1))
    if rank == 1 and draw(st.booleans()):
        axis = None
    size = x_shape[0 if axis is None else axis]
    indices = draw(index_arrays(draw(shapes(max_rank=2)), size))
    return x_shape, indices, axis, draw(st.sampled_from(MODES))


@st.composite
def gathers(draw):
    data_shape = draw(shapes(min_rank=1))
    rank = len(data_shape)
    axis = draw(st.integers(-rank, rank - 1))
    shape = draw(st.tuples(*(st.integers(0, 5) for _ in data_shape)))
    indices = draw(index_arrays(shape, data_shape[axis], ("int64", "int32", "int8")))
    return data_shape, indices, axis


@st.composite
def elements(draw):
    data_shape = draw(shapes(min_rank=1))
    axis = draw(st.integers(-len(data_shape), len(data_shape) - 1))
    shape = draw(st.tuples(*(st.integers(0, 5) for _ in data_shape)))
    return data_shape, draw(index_arrays(shape, data_shape[axis], INDEX_DTYPES)), axis


@st.composite
def points(draw, batched=False, dtypes=INDEX_DTYPES):
    data_shape = draw(shapes(min_rank=1))
    count = draw(st.integers(1, len(data_shape)))
    batch_dims = draw(st.integers(0, len(data_shape) - count)) if batched else 0
    batch = tuple(draw(st.integers(1, 4)) for _ in range(batch_dims))
    shape = (*batch, *draw(shapes(max_rank=2)), count)
    return data_shape, draw(index_arrays(shape, max(data_shape), dtypes)), batch_dims


@st.composite
def tensors(draw, all_axes=False, min_rank=0, dtypes=INDEX_DTYPES):
    data_shape = draw(shapes(min_rank=1))
    count = len(data_shape) if all_axes else draw(st.integers(1, len(data_shape)))
    common = draw(shapes(min_rank, 2))
    indices = []
    for size in data_shape[:count]:
        own = common[draw(st.integers(0, len(common) - min_rank)) :]
        own = tuple(1 if draw(st.booleans()) else extent for extent in own)
        indices.append(draw(index_arrays(own, size, dtypes)))
    return data_shape, indices
