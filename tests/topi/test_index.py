"""The tensor expressions of take, gather_elements and their gradients against loops over elements."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from sweep import TARGET
from threads import without_threads
from tvm import te, tirx

from relax_grad.topi import index as topi_index
from relax_grad.topi._util import on_gpu

MODES = ("fast", "clip", "wrap", "nan")
INDEX_DTYPES = ("int64", "int32", "int8", "uint8", "uint32", "uint64")


def element_of(index: int, size: int, mode: str) -> int | None:
    """The element that an index means, in Python's integers."""
    if mode == "clip" and size:
        return min(max(index, 0), size - 1)
    if mode == "wrap" and size:
        return index % size
    if mode == "fast" and index < 0:
        index += size
    return index if 0 <= index < size else None


def take_pairs(x_shape, indices, axis, mode):
    """Yield the place in the result and the place in the data, or None, of each element taken."""
    for at in np.ndindex(*x_shape[:axis], *indices.shape, *x_shape[axis + 1 :]):
        behind = axis + indices.ndim
        where = element_of(int(indices[at[axis:behind]]), x_shape[axis], mode)
        yield at, None if where is None else (*at[:axis], where, *at[behind:])


def gather_pairs(data_shape, indices, axis):
    """The same of gather_elements."""
    for at in np.ndindex(*indices.shape):
        where = element_of(int(indices[at]), data_shape[axis], "fast")
        others = (
            a < size for i, (a, size) in enumerate(zip(at, data_shape, strict=True)) if i != axis
        )
        inside = where is not None and all(others)
        yield at, (*at[:axis], where, *at[axis + 1 :]) if inside else None


class Fenced:
    """An array between two fences of NaN, or of large numbers, in the same memory."""

    FENCE = 4096

    def __init__(self, array):
        line = 64 // array.itemsize  # TVM wants tensors aligned to 64 bytes
        is_float = np.issubdtype(array.dtype, np.floating)
        self._fill = np.nan if is_float else np.iinfo(array.dtype).max
        memory = np.full(2 * self.FENCE + array.size + line, self._fill, array.dtype)
        skip = -memory.ctypes.data % 64 // array.itemsize + self.FENCE
        self.array = memory[skip : skip + array.size].reshape(array.shape)
        self.array[...] = array
        self._outside = memory[:skip], memory[skip + array.size :]

    def tensor(self):
        if not self.array.size:  # NumPy gives an empty view any address, TVM wants an aligned one
            return tvm.runtime.tensor(self.array)
        return tvm.runtime.from_dlpack(self.array)

    def intact(self) -> bool:
        return all(np.array_equal(p, np.full_like(p, self._fill), True) for p in self._outside)


def int64(size):
    """An extent as in Relax: TVM simplifies indices of int32 differently."""
    return tirx.IntImm("int64", size)


def run(expression, inputs, shape, dtype, symbolic=False):
    """Compile ``expression(*placeholders)`` and run it between fences; threads of a GPU, as loops."""
    sizes = {}

    def extent(size):
        return sizes.setdefault(size, tirx.Var(f"n{size}", "int64")) if symbolic else int64(size)

    placeholders = [
        te.placeholder([extent(size) for size in array.shape], array.dtype.name, name=f"x{i}")
        for i, array in enumerate(inputs)
    ]
    result = expression(*placeholders)
    assert result.dtype == dtype
    assert len(result.shape) == len(shape)
    function = without_threads(te.create_prim_func([*placeholders, result]))
    # The loops of the threads are long for LLVM, and not what runs.
    kernel = tvm.compile(function, target=TARGET if on_gpu() else "llvm")
    fenced = [Fenced(array) for array in (*inputs, np.full(shape, 7, dtype))]
    kernel(*(item.tensor() for item in fenced))
    assert all(item.intact() for item in fenced)
    for item, array in zip(fenced, inputs, strict=False):
        np.testing.assert_array_equal(item.array, array)
    return fenced[-1].array


def check_take(x_shape, indices, axis, mode, dtype="float64", symbolic=False):
    rng = np.random.default_rng(0)
    rank = len(x_shape)
    plain = 0 if axis is None else axis % rank
    x = rng.normal(size=x_shape).astype(dtype)
    shape = (*x_shape[:plain], *indices.shape, *x_shape[plain + 1 :])
    grad = rng.normal(size=shape).astype(dtype)
    taken, with_zero = np.full(shape, np.nan, dtype), np.zeros(shape, dtype)
    expected = np.zeros(x_shape)
    for at, where in take_pairs(x_shape, indices, plain, mode):
        if where is not None:
            taken[at] = with_zero[at] = x[where]
            expected[where] += float(grad[at])
    for fill, wanted in (("nan", taken), ("zero", with_zero)):
        found = run(
            lambda a, i, fill=fill: topi_index.take(a, i, axis, mode, fill),
            [x, indices],
            shape,
            dtype,
            symbolic,
        )
        np.testing.assert_array_equal(found, wanted)
    # The data is an input for its shape only, which is symbolic where the data's is.
    found = run(
        lambda dy, i, a: topi_index.take_backward(dy, i, a.shape, axis, mode),
        [grad, indices, x],
        x_shape,
        dtype,
        symbolic,
    )
    tolerance = 1e-12 if dtype == "float64" else 1e-3
    np.testing.assert_allclose(found, expected, tolerance, tolerance)


def check_gather(data_shape, indices, axis, dtype="float64", symbolic=False):
    rng = np.random.default_rng(0)
    plain = axis % len(data_shape)
    data = rng.normal(size=data_shape).astype(dtype)
    grad = rng.normal(size=indices.shape).astype(dtype)
    taken, with_zero = np.full(indices.shape, np.nan, dtype), np.zeros(indices.shape, dtype)
    expected = np.zeros(data_shape)
    for at, where in gather_pairs(data_shape, indices, plain):
        if where is not None:
            taken[at] = with_zero[at] = data[where]
            expected[where] += float(grad[at])
    for fill, wanted in (("nan", taken), ("zero", with_zero)):
        found = run(
            lambda a, i, fill=fill: topi_index.gather_elements(a, i, axis, fill),
            [data, indices],
            indices.shape,
            dtype,
            symbolic,
        )
        np.testing.assert_array_equal(found, wanted)
    found = run(
        lambda dy, i, a: topi_index.gather_elements_backward_data(dy, i, a.shape, axis),
        [grad, indices, data],
        data_shape,
        dtype,
        symbolic,
    )
    tolerance = 1e-12 if dtype == "float64" else 1e-3
    np.testing.assert_allclose(found, expected, tolerance, tolerance)


def shapes(min_rank=0, max_rank=3, min_side=0):
    return st.lists(st.integers(min_side, 4), min_size=min_rank, max_size=max_rank).map(tuple)


@st.composite
def index_arrays(draw, shape, size, dtypes=INDEX_DTYPES):
    """Indices inside, near and far outside an axis, as far as their dtype goes."""
    dtype = draw(st.sampled_from(dtypes))
    limits = np.iinfo(dtype)
    low, high = int(limits.min), int(limits.max)
    near = st.integers(max(low, -2 * size - 2), min(high, 2 * size + 2))
    values = st.one_of(near, near, st.sampled_from([low, low + 1, high - 1, high]))
    count = int(np.prod(shape))
    drawn = draw(st.lists(values, min_size=count, max_size=count))
    return np.array(drawn, dtype).reshape(shape)


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


few = settings(max_examples=15, deadline=None, derandomize=True)
many = settings(max_examples=200, deadline=None)


@few
@given(takes())
def test_take(case):
    check_take(*case)


@few
@given(takes())
def test_take_symbolic(case):
    check_take(*case, symbolic=True)


@few
@given(gathers())
def test_gather_elements(case):
    check_gather(*case)


@few
@given(gathers())
def test_gather_elements_symbolic(case):
    check_gather(*case, symbolic=True)


@pytest.mark.slow
@many
@given(takes(), st.booleans(), st.sampled_from(["float64", "float32", "float16"]))
def test_many_takes(case, symbolic, dtype):
    check_take(*case, dtype=dtype, symbolic=symbolic)


@pytest.mark.slow
@many
@given(gathers(), st.booleans(), st.sampled_from(["float64", "float32", "float16"]))
def test_many_gathers(case, symbolic, dtype):
    check_gather(*case, dtype=dtype, symbolic=symbolic)


@pytest.mark.parametrize("behind", [(1,), (63,), (64,), (65,), (200,), (3, 50), (2, 0)], ids=str)
@pytest.mark.parametrize("symbolic", [False, True])
def test_take_backward_in_pieces(behind, symbolic):
    """The axis behind the indexed one is divided among parallel tasks, whatever its extent."""
    indices = np.array([[2, 0, 2], [-1, 5, -4]])
    check_take((2, 3, *behind), indices, 1, "fast", symbolic=symbolic)


def test_unsigned_indices_do_not_count_from_the_end():
    for mode in MODES:
        check_take((3,), np.array([2**64 - 1, 2**63, 1], "uint64"), 0, mode)
        check_take((3,), np.array([2**32 - 1, 2**31, 1], "uint32"), 0, mode)


@pytest.mark.parametrize("mode", MODES)
def test_scalar_index(mode):
    """An index that is an expression counts as one of rank 0."""
    x, grad = np.arange(12.0).reshape(3, 4), np.array([1.0, 2.0, 3.0])
    for index in (-5, -1, 0, 3, 4):
        where = element_of(index, 4, mode)
        scalar = tirx.IntImm("int64", index)
        found = run(lambda a, s=scalar: topi_index.take(a, s, 1, mode, "nan"), [x], (3,), "float64")
        np.testing.assert_array_equal(found, np.full(3, np.nan) if where is None else x[:, where])
        expected = np.zeros((3, 4))
        if where is not None:
            expected[:, where] = grad
        found = run(
            lambda dy, s=scalar: topi_index.take_backward(dy, s, (3, 4), 1, mode),
            [grad],
            (3, 4),
            "float64",
        )
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool"])
def test_integers_are_filled_with_zero(dtype):
    x = te.placeholder((3,), dtype)
    indices = te.placeholder((2,), "int64")
    taken = topi_index.take(x, indices, 0, "fast", "nan")
    kernel = tvm.compile(te.create_prim_func([x, indices, taken]), target="llvm")
    out = tvm.runtime.tensor(np.ones(2, dtype))
    kernel(tvm.runtime.tensor(np.ones(3, dtype)), tvm.runtime.tensor(np.array([1, 3])), out)
    np.testing.assert_array_equal(out.numpy(), np.array([1, 0], dtype))


def test_half_precision_accumulates_in_float32():
    """The sum of 4096 ones, in float16 itself, would stop at 2048."""
    grad, indices = np.ones(4096, "float16"), np.zeros(4096, "int32")
    for expression in (
        lambda dy, i: topi_index.take_backward(dy, i, (2,), 0, "fast"),
        lambda dy, i: topi_index.gather_elements_backward_data(dy, i, (2,), 0),
    ):
        found = run(expression, [grad, indices], (2,), "float16")
        np.testing.assert_array_equal(found, [4096, 0])


def test_unknown_mode():
    with pytest.raises(ValueError, match=r"mode must be .* but it is 'raise'"):
        topi_index.position(tirx.IntImm("int64", 0), tirx.IntImm("int64", 3), "raise")
