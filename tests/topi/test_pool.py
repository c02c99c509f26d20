"""The tensor expressions of pooling's gradients against a loop over every window."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from packing import in_layout, layouts, parts_of
from sweep import TARGET, one_by_one
from tvm import te, tirx
from tvm.s_tir import Schedule

from relax_grad.topi import pool

TOLERANCES = {"float16": 2e-3, "float32": 1e-6, "float64": 1e-12}


@dataclass(frozen=True)
class Case:
    """A pooling. Shapes are in the order N, C, spatial axes; the layouts are those of the stored
    tensors."""

    data_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    pool_size: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    layout: str
    out_layout: str

    @property
    def plain(self) -> str:
        return "NC" + "DHW"[5 - len(self.data_shape) :]

    def windows(self) -> dict:
        return {
            "pool_size": list(self.pool_size),
            "strides": list(self.strides),
            "padding": list(self.padding),
            "dilation": list(self.dilation),
            "layout": self.layout,
            "out_layout": self.out_layout,
        }

    def walk(self):
        """Yield each window and the elements at its taps, row by row, including those in the
        padding."""
        for window in np.ndindex(*self.out_shape):
            yield (
                window,
                [
                    window[:2]
                    + tuple(
                        o * s + t * d - p
                        for o, s, t, d, p in zip(
                            window[2:], self.strides, tap, self.dilation, self.padding, strict=False
                        )
                    )
                    for tap in np.ndindex(*self.pool_size)
                ],
            )

    def in_data(self, element) -> bool:
        return all(0 <= i < extent for i, extent in zip(element, self.data_shape, strict=True))

    def winners(self, data):
        """Yield each window with its largest element, in the order of PyTorch's CPU kernel."""
        for window, elements in self.walk():
            winner = None
            for element in filter(self.in_data, elements):
                if winner is None or data[element] > data[winner] or np.isnan(data[element]):
                    winner = element
            yield window, winner

    def in_layout(self, array, layout):
        return in_layout(array, self.plain, layout)


@st.composite
def cases(draw, rank=None):
    rank = rank or draw(st.integers(1, 3))

    def per_axis(low, high):
        return tuple(draw(st.integers(low, high)) for _ in range(rank))

    extents, pool_size, strides, dilation = (
        per_axis(1, 7 - rank),
        per_axis(1, 3),
        per_axis(1, 4),
        per_axis(1, 3),
    )
    before, after = per_axis(0, 4), per_axis(0, 4)
    ceil_mode = draw(st.booleans())
    outputs = []
    for extent, k, s, d, b, a in zip(
        extents, pool_size, strides, dilation, before, after, strict=True
    ):
        space = extent + b + a - (k - 1) * d - 1
        count = (-(-space // s) if ceil_mode else space // s) + 1
        outputs.append(min(max(count, 0), 5))
    plain = "NC" + "DHW"[3 - rank :]
    layout, out_layout = draw(layouts(plain)), draw(layouts(plain))
    batch = tuple(draw(st.integers(1, 2)) * parts_of(layout).get(name, 1) for name in "NC")
    return Case(
        batch + extents,
        batch + tuple(outputs),
        pool_size,
        strides,
        before + after,
        dilation,
        layout,
        out_layout,
    )


def fenced(shape, dtype, value=None):
    """Return an array between two ranges of NaN, and a function that tells whether the ranges are
    intact."""
    fence = 1024
    size = int(np.prod(shape))
    memory = np.full(2 * fence + size + 64, np.nan, dtype)
    start = fence + (-memory.ctypes.data % 64) // memory.itemsize
    array = memory[start : start + size].reshape(shape)
    array[...] = 0 if value is None else value

    def unharmed():
        return np.isnan(memory[:start]).all() and np.isnan(memory[start + size :]).all()

    return array, unharmed


def run(expression, *inputs, change=None):
    """Compile ``expression(*placeholders)`` and run it on arrays between ranges of NaN."""
    shapes = [[tirx.IntImm("int64", size) for size in a.shape] for a in inputs]
    tensors = [
        te.placeholder(shape, a.dtype.name, f"x{i}")
        for i, (shape, a) in enumerate(zip(shapes, inputs, strict=True))
    ]
    result = expression(*tensors)
    function = te.create_prim_func([*tensors, result])
    kernel = tvm.compile(change(function) if change else function, target=TARGET)
    shape = tuple(int(extent) for extent in result.shape)
    arrays = [fenced(a.shape, a.dtype, a) for a in inputs] + [fenced(shape, str(result.dtype))]
    # An empty array has no memory to share.
    make = (tvm.runtime.from_dlpack if array.size else tvm.runtime.tensor for array, _ in arrays)
    kernel(*(to_tensor(array) for to_tensor, (array, _) in zip(make, arrays, strict=True)))
    assert all(unharmed() for _, unharmed in arrays)
    return arrays[-1][0]


def special_values(rng, shape, dtype):
    """Draw data with many ties, NaN and infinities."""
    return rng.choice([0.0, 1.0, 2.0, np.nan, -np.inf, np.inf], shape).astype(dtype)


def check_max_pool(case, data, rng, dtype, change=None):
    grad = rng.normal(size=case.out_shape).astype(dtype)
    tangent = rng.normal(size=case.data_shape).astype(dtype)
    data_grad, derivative = np.zeros(case.data_shape), np.zeros(case.out_shape)
    for window, winner in case.winners(data):
        if winner is not None:
            data_grad[winner] += grad[window]
            derivative[window] = tangent[winner]
    stored = case.in_layout(data, case.layout)

    result = run(
        lambda g, x: pool.max_pool_backward(g, x, **case.windows()),
        case.in_layout(grad, case.out_layout),
        stored,
        change=change,
    )
    assert result.dtype == dtype
    tolerance = TOLERANCES[dtype]
    expected = case.in_layout(data_grad, case.layout)
    np.testing.assert_allclose(result, expected, rtol=tolerance, atol=tolerance)

    expected = case.in_layout(derivative, case.out_layout)
    out_shape = [tirx.IntImm("int64", extent) for extent in expected.shape]
    result = run(
        lambda v, x: pool.max_pool_jvp(v, x, out_shape, **case.windows()),
        case.in_layout(tangent, case.layout),
        stored,
        change=change,
    )
    assert result.dtype == dtype
    np.testing.assert_array_equal(result, expected)


def check_avg_pool(case, rng, dtype, count_include_pad):
    grad = rng.normal(size=case.out_shape).astype(dtype)
    rank = len(case.pool_size)
    data_grad = np.zeros(case.data_shape)
    for window, elements in case.walk():
        counted = [
            element
            for element in elements
            if case.in_data(element)
            or (
                count_include_pad
                and all(
                    i < extent + after
                    for i, extent, after in zip(
                        element[2:], case.data_shape[2:], case.padding[rank:], strict=True
                    )
                )
            )
        ]
        for element in filter(case.in_data, counted):
            data_grad[element] += grad[window] / len(counted)
    expected = case.in_layout(data_grad, case.layout)
    shape = [tirx.IntImm("int64", extent) for extent in expected.shape]
    result = run(
        lambda g: pool.avg_pool_backward(
            g, shape, count_include_pad=count_include_pad, out_dtype=dtype, **case.windows()
        ),
        case.in_layout(grad, case.out_layout),
    )
    assert result.dtype == dtype
    tolerance = TOLERANCES[dtype]
    np.testing.assert_allclose(result, expected, rtol=tolerance, atol=tolerance)


def sweep_max_pool(case, dtype, special, seed):
    rng = np.random.default_rng(seed)
    make = special_values if special else lambda r, *a: r.normal(size=a[0]).astype(a[1])
    check_max_pool(case, make(rng, case.data_shape, dtype), rng, dtype)


def sweep_avg_pool(case, dtype, count_include_pad, seed):
    check_avg_pool(case, np.random.default_rng(seed), dtype, count_include_pad)


MAX_POOL = given(cases(), st.sampled_from(sorted(TOLERANCES)), st.booleans(), st.integers(0, 99))
AVG_POOL = given(cases(), st.sampled_from(sorted(TOLERANCES)), st.booleans(), st.integers(0, 99))
FEW = settings(max_examples=15, deadline=None, derandomize=True)
MANY = one_by_one(200, derandomize=True)

test_max_pool = FEW(MAX_POOL(sweep_max_pool))
test_avg_pool = FEW(AVG_POOL(sweep_avg_pool))
test_max_pool_many = pytest.mark.slow(MANY(MAX_POOL(sweep_max_pool)))
test_avg_pool_many = pytest.mark.slow(MANY(AVG_POOL(sweep_avg_pool)))


@pytest.mark.parametrize(("layout", "out_layout"), [("NCHW", "NCHW4c"), ("2nN3cCHW", "[3c2n]WHCN")])
def test_layouts_with_padded_channels(layout, out_layout):
    """Padded channels are zero: the result has zeros there, and they do not affect other
    channels."""
    shapes = (2, 6, 4, 3), (2, 6, 2, 2)
    case = Case(*shapes, (3, 2), (2, 1), (1, 0) * 2, (1, 1), layout, out_layout)
    rng = np.random.default_rng(0)
    check_max_pool(case, special_values(rng, case.data_shape, "float64"), rng, "float64")
    check_avg_pool(case, rng, "float64", False)


PLAIN = Case((1, 2, 5, 6), (1, 2, 2, 3), (3, 3), (2, 2), (0, 1, 0, 0), (1, 1), "NCHW", "NCHW")
IN_PADDING = Case((1, 1, 2, 1), (1, 1, 7, 6), (2, 2), (1, 1), (3,) * 4, (1, 1), "NCHW", "NCHW")


@pytest.mark.parametrize("dtype", sorted(TOLERANCES))
@pytest.mark.parametrize(
    "value", [0.0, -np.inf, np.inf, np.nan], ids=["equal", "-inf", "inf", "nan"]
)
def test_a_window_of_one_value(value, dtype):
    """The first element wins; among NaN, the last one."""
    check_max_pool(PLAIN, np.full(PLAIN.data_shape, value, dtype), np.random.default_rng(0), dtype)


@pytest.mark.parametrize("value", [0.0, -np.inf, np.nan])
def test_windows_that_hold_only_padding(value):
    rng = np.random.default_rng(0)
    check_max_pool(IN_PADDING, np.full(IN_PADDING.data_shape, value), rng, "float64")
    for count_include_pad in (False, True):
        check_avg_pool(IN_PADDING, rng, "float64", count_include_pad)


def test_zeros_of_either_sign_are_equal():
    data = np.where(np.arange(60).reshape(PLAIN.data_shape) % 3, 0.0, -0.0)
    check_max_pool(PLAIN, data, np.random.default_rng(0), "float64")


@pytest.mark.parametrize("layout", ["NCW", "NWC", "CWN"])
def test_one_element_and_one_window_over_it(layout):
    """The window of a tap is ``(1 - tap) / 2`` here; TVM's simplifier computes the floor in an
    index wrongly."""
    case = Case((2, 2, 1), (2, 2, 1), (3,), (2,), (1, 0), (1,), layout, layout)
    rng = np.random.default_rng(0)
    check_max_pool(case, rng.normal(size=case.data_shape), rng, "float64")
    check_avg_pool(case, rng, "float64", True)


def test_no_windows():
    case = Case((1, 2, 3, 3), (1, 2, 0, 0), (4, 4), (1, 1), (0,) * 4, (1, 1), "NCHW", "NCHW")
    rng = np.random.default_rng(0)
    check_max_pool(case, rng.normal(size=case.data_shape), rng, "float64")
    check_avg_pool(case, rng, "float64", False)


def test_any_order_of_reduction():
    """The same element wins for any order in which a schedule visits the window."""

    def reverse(function):
        schedule = Schedule(function)
        for name in ("max_pool_largest", "max_pool_rank"):
            *_, row, column = schedule.get_loops(schedule.get_sblock(name))
            schedule.reorder(column, row)
        return schedule.mod

    rng = np.random.default_rng(0)
    for make in (special_values, lambda r, shape, dtype: r.integers(0, 2, shape).astype(dtype)):
        data = make(rng, PLAIN.data_shape, "float64")
        check_max_pool(PLAIN, data, rng, "float64", change=reverse)


def test_half_precision_is_accumulated_in_single():
    """The middle element is the maximum of every window, and its gradient sums 961 float16
    numbers."""
    case = Case((1, 1, 61, 61), (1, 1, 31, 31), (31, 31), (1, 1), (0,) * 4, (1, 1), "NCHW", "NCHW")
    data = np.zeros(case.data_shape, "float16")
    data[0, 0, 30, 30] = 1
    grad = np.full(case.out_shape, 1.001, "float16")
    result = run(lambda g, x: pool.max_pool_backward(g, x, **case.windows()), grad, data)
    assert result[0, 0, 30, 30] == np.float16(grad.astype("float64").sum())
    result = run(
        lambda g: pool.avg_pool_backward(
            g,
            case.data_shape,
            count_include_pad=False,
            out_dtype="float16",
            **case.windows(),
        ),
        grad,
    )
    expected = grad.astype("float64").sum() / 961
    np.testing.assert_allclose(result[0, 0, 30, 30], expected, rtol=6e-4)


def adaptive_windows(extent, output):
    """Return the elements of each window, as PyTorch defines them."""
    return [range(o * extent // output, -(-(o + 1) * extent // output)) for o in range(output)]


@st.composite
def adaptive_cases(draw):
    """Draw the extents of the data and of the result, and both layouts."""
    rank = draw(st.integers(1, 3))
    extents, outputs = (
        tuple(draw(st.integers(1, high)) for _ in range(rank)) for high in (9 - 2 * rank, 7)
    )
    plain = "NC" + "DHW"[3 - rank :]
    return extents, outputs, draw(layouts(plain)), draw(layouts(plain))


def sweep_adaptive_avg_pool(case, dtype, seed):
    extents, outputs, layout, out_layout = case
    plain = "NC" + "DHW"[3 - len(extents) :]
    batch = tuple(parts_of(layout).get(name, 2) for name in "NC")
    grad = np.random.default_rng(seed).normal(size=(*batch, *outputs)).astype(dtype)
    windows = [adaptive_windows(*pair) for pair in zip(extents, outputs, strict=True)]
    data_grad = np.zeros((*batch, *extents))
    for window in np.ndindex(*outputs):
        elements = np.ix_(*(axis[o] for axis, o in zip(windows, window, strict=True)))
        count = np.prod([index.size for index in elements])
        share = grad[(slice(None), slice(None), *window)].astype("float64") / count
        at = (slice(None), slice(None), *elements)
        data_grad[at] += share.reshape(*batch, *(1 for _ in extents))
    expected = in_layout(data_grad, plain, layout)
    shape = [tirx.IntImm("int64", size) for size in expected.shape]
    result = run(
        lambda g: pool.adaptive_avg_pool_backward(g, shape, layout, out_layout, dtype),
        in_layout(grad, plain, out_layout),
    )
    assert result.dtype == dtype
    np.testing.assert_allclose(result, expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


ADAPTIVE = given(adaptive_cases(), st.sampled_from(sorted(TOLERANCES)), st.integers(0, 99))
test_adaptive_avg_pool = FEW(ADAPTIVE(sweep_adaptive_avg_pool))
test_adaptive_avg_pool_many = pytest.mark.slow(MANY(ADAPTIVE(sweep_adaptive_avg_pool)))


@pytest.mark.parametrize("output", [1, 2, 3, 4, 6, 8, 12, 24])
@pytest.mark.parametrize("extent", [1, 6, 7, 12])
def test_adaptive_windows_that_tile_and_that_do_not(extent, output):
    sweep_adaptive_avg_pool(((extent,), (output,), "NCW", "NCW"), "float64", 0)


def test_adaptive_avg_pool_of_half_precision_is_accumulated_in_single():
    """4096 windows contain the same element."""
    grad = np.full((1, 1, 4096), 1, "float16")
    shape = [tirx.IntImm("int64", 1)] * 3
    result = run(lambda g: pool.adaptive_avg_pool_backward(g, shape, "NCW", "NCW", "float16"), grad)
    assert result.item() == 4096


@pytest.mark.parametrize(("shape", "output"), [((0, 2, 3), 2), ((1, 2, 0), 2), ((1, 2, 3), 0)])
def test_adaptive_avg_pool_of_nothing(shape, output):
    grad = np.zeros((*shape[:2], output))
    shape = [tirx.IntImm("int64", size) for size in shape]
    result = run(lambda g: pool.adaptive_avg_pool_backward(g, shape, "NCW", "NCW", "float64"), grad)
    assert not result.any()
