"""The tensor expressions of the gradients of convolution against explicit sums in NumPy."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels import Fenced
from sweep import TARGET, one_by_one
from tvm import te, tirx

from relax_grad.topi.conv import conv_backward_data, conv_backward_weight

SPATIAL = {1: "W", 2: "HW", 3: "DHW"}


@dataclass(frozen=True)
class Conv:
    """A convolution of any rank, with shapes and layouts in the order of ``NC...`` and
    ``OI...``."""

    data: tuple
    weight: tuple
    strides: tuple
    padding: tuple
    dilation: tuple
    groups: int
    data_layout: str
    kernel_layout: str
    out_layout: str

    @property
    def spatial(self) -> str:
        return SPATIAL[len(self.strides)]

    @property
    def output(self) -> tuple:
        rank = len(self.strides)
        extents = (
            max(0, (size + before + after - (k - 1) * d - 1) // s + 1)
            for size, before, after, k, d, s in zip(
                self.data[2:],
                self.padding[:rank],
                self.padding[rank:],
                self.weight[2:],
                self.dilation,
                self.strides,
                strict=True,
            )
        )
        return (self.data[0], self.weight[0], *extents)

    def attrs(self) -> dict:
        names = ("strides", "padding", "dilation", "groups")
        layouts = ("data_layout", "kernel_layout", "out_layout")
        return {name: getattr(self, name) for name in (*names, *layouts)}

    def products(self):
        """Yield the indices into output, data and weight of every product of the convolution."""
        in_group, out_group = self.weight[1], self.weight[0] // self.groups
        for n, o in itertools.product(range(self.data[0]), range(self.weight[0])):
            for y in np.ndindex(*self.output[2:]):
                for i, *k in np.ndindex(*self.weight[1:]):
                    x = [
                        a * s + b * d - p
                        for a, s, b, d, p in zip(
                            y, self.strides, k, self.dilation, self.padding, strict=False
                        )
                    ]
                    if all(0 <= at < size for at, size in zip(x, self.data[2:], strict=True)):
                        yield (n, o, *y), (n, o // out_group * in_group + i, *x), (o, i, *k)

    def backward(self, grad, data, weight):
        """Return the gradients of the data and of the weight in float64."""
        data_grad, weight_grad = np.zeros(self.data), np.zeros(self.weight)
        for at_y, at_x, at_w in self.products():
            data_grad[at_x] += float(grad[at_y]) * float(weight[at_w])
            weight_grad[at_w] += float(grad[at_y]) * float(data[at_x])
        return data_grad, weight_grad


def transpose(array, plain: str, layout: str):
    return np.ascontiguousarray(array.transpose([plain.index(name) for name in layout]))


def relax_shape(shape):
    """Return the extents in int64, as in Relax: TVM simplifies int32 indices differently."""
    return [tirx.IntImm("int64", extent) for extent in shape]


def run(expression, inputs, result_shape, dtype):
    """Compile ``expression(*placeholders)`` and run it between fences."""
    placeholders = [
        te.placeholder(relax_shape(array.shape), array.dtype.name, name=f"x{i}")
        for i, array in enumerate(inputs)
    ]
    result = expression(*placeholders)
    assert result.dtype == dtype
    assert tuple(int(dim) for dim in result.shape) == tuple(result_shape)
    kernel = tvm.compile(te.create_prim_func([*placeholders, result]), target=TARGET)
    fenced = [Fenced(array) for array in (*inputs, np.full(result_shape, 7, dtype))]
    kernel(*(item.tensor() for item in fenced))
    assert all(item.intact() for item in fenced)
    for item, array in zip(fenced, inputs, strict=False):
        np.testing.assert_array_equal(item.array, array)
    return fenced[-1].array


def gradients(conv: Conv, grad, data, weight, dtype):
    """Return both gradients from the tensor expressions, in the plain layouts."""
    names, kernel_names = "NC" + conv.spatial, "OI" + conv.spatial
    grad = transpose(grad, names, conv.out_layout)
    data = transpose(data, names, conv.data_layout)
    weight = transpose(weight, kernel_names, conv.kernel_layout)
    data_grad = run(
        lambda dy, w: conv_backward_data(dy, w, data.shape, **conv.attrs(), out_dtype=dtype),
        [grad, weight],
        data.shape,
        dtype,
    )
    weight_grad = run(
        lambda dy, x: conv_backward_weight(dy, x, weight.shape, **conv.attrs(), out_dtype=dtype),
        [grad, data],
        weight.shape,
        dtype,
    )
    return (
        transpose(data_grad, conv.data_layout, names),
        transpose(weight_grad, conv.kernel_layout, kernel_names),
    )


def check(conv: Conv, dtype="float64", rtol=1e-12):
    rng = np.random.default_rng(0)
    grad, data, weight = (
        rng.normal(size=shape).astype(dtype) for shape in (conv.output, conv.data, conv.weight)
    )
    grads = gradients(conv, grad, data, weight, dtype)
    for got, expected in zip(grads, conv.backward(grad, data, weight), strict=True):
        np.testing.assert_allclose(got, expected, rtol, rtol)


@st.composite
def convs(draw, rank=None):
    rank = draw(st.integers(1, 3)) if rank is None else rank
    spatial = SPATIAL[rank]
    small = 3 if rank == 3 else 5

    def per_axis(low, high):
        return tuple(draw(st.integers(low, high)) for _ in range(rank))

    groups = draw(st.integers(1, 3))
    in_group, out_group = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    kernel, dilation, padding = per_axis(1, 3), per_axis(1, 3), per_axis(0, 3) + per_axis(0, 3)
    # The data may be smaller than the kernel if the padding makes up for it.
    extents = tuple(
        draw(st.integers(max(1, (k - 1) * d + 1 - before - after), small + (k - 1) * d))
        for k, d, before, after in zip(
            kernel, dilation, padding[:rank], padding[rank:], strict=True
        )
    )

    def layout(names):
        return "".join(draw(st.permutations(names)))

    return Conv(
        (draw(st.integers(1, 2)), groups * in_group, *extents),
        (groups * out_group, in_group, *kernel),
        per_axis(1, 4),
        padding,
        dilation,
        groups,
        layout("NC" + spatial),
        layout("OI" + spatial),
        layout("NC" + spatial),
    )


@settings(max_examples=12, deadline=None, derandomize=True)
@given(convs())
def test_any_rank_and_layout(conv):
    check(conv)


@pytest.mark.slow
@one_by_one(200)
@given(convs())
def test_any_rank_and_layout_at_length(conv):
    check(conv)


def plain(data, weight, strides=None, padding=None, dilation=None, groups=1):
    rank = len(data) - 2
    names = SPATIAL[rank]
    return Conv(
        data,
        weight,
        strides or (1,) * rank,
        padding or (0,) * 2 * rank,
        dilation or (1,) * rank,
        groups,
        "NC" + names,
        "OI" + names,
        "NC" + names,
    )


@pytest.mark.parametrize(
    "conv",
    [
        pytest.param(plain((1, 2, 9), (3, 2, 3), (4,)), id="1d, the stride leaves data out"),
        pytest.param(
            plain((1, 1, 1), (1, 1, 5), None, (2, 2)), id="1d, one element in a wide kernel"
        ),
        pytest.param(plain((1, 1, 2), (1, 1, 1), None, (3, 4)), id="1d, windows of padding alone"),
        pytest.param(plain((1, 1, 5), (1, 1, 3), None, (-1, -1)), id="1d, cropped"),
        pytest.param(plain((2, 1, 3), (1, 1, 4)), id="1d, no window fits"),
        pytest.param(plain((2, 1, 1), (1, 1, 4)), id="1d, the kernel reaches far beyond"),
        pytest.param(plain((0, 2, 4), (3, 2, 2)), id="1d, empty batch"),
        pytest.param(plain((1, 4, 3, 4), (8, 1, 3, 2), groups=4), id="2d, depthwise, multiplier 2"),
        pytest.param(
            plain((1, 2, 3, 2, 4), (2, 1, 2, 2, 1), (1, 2, 3), (1, 0, 0, 0, 1, 2), (2, 1, 1), 2),
            id="3d",
        ),
    ],
)
def test_edges(conv):
    check(conv)


@pytest.mark.parametrize(("dtype", "rtol"), [("float32", 1e-5), ("float16", 2e-3)])
def test_dtypes(dtype, rtol):
    check(plain((2, 3, 5, 4), (2, 3, 3, 2), (2, 1), (1, 0, 0, 1)), dtype, rtol)


def test_half_precision_accumulates_in_float32():
    """A float16 sum of ones stops at 2048."""
    ones = [np.ones(shape, "float16") for shape in ((1, 4096, 1), (1, 1, 1), (4096, 1, 1))]
    data_grad, _ = gradients(plain((1, 1, 1), (4096, 1, 1)), *ones, "float16")
    assert data_grad.item() == 4096
    ones = [np.ones(shape, "float16") for shape in ((4, 1, 1024), (4, 1, 1024), (1, 1, 1))]
    _, weight_grad = gradients(plain((4, 1, 1024), (1, 1, 1)), *ones, "float16")
    assert weight_grad.item() == 4096


def test_out_dtype_is_not_that_of_the_inputs():
    conv = plain((1, 2, 4), (3, 2, 2))
    rng = np.random.default_rng(0)
    inputs = [rng.normal(size=s).astype("float16") for s in (conv.output, conv.data, conv.weight)]
    # Products of halves are exact in float32, and so are short sums up to its own precision.
    for got, expected in zip(
        gradients(conv, *inputs, "float32"), conv.backward(*inputs), strict=True
    ):
        np.testing.assert_allclose(got, expected, 1e-6, 1e-6)


def test_values_beyond_the_last_window_do_not_count():
    """Elements that the forward operator never reads must not affect the gradient, even if they are
    NaN."""
    conv = plain((1, 1, 6), (1, 1, 2), (3,))
    data = np.arange(6.0).reshape(conv.data)
    data[0, 0, [2, 5]] = np.nan
    grad, weight = np.ones(conv.output), np.ones(conv.weight)
    data_grad, weight_grad = gradients(conv, grad, data, weight, "float64")
    np.testing.assert_array_equal(data_grad[0, 0], [1, 1, 0, 1, 1, 0])
    np.testing.assert_array_equal(weight_grad[0, 0], [3, 5])


def test_symbolic_extents():
    n, size, out = (tirx.Var(name, "int64") for name in ("n", "size", "out"))
    attrs = plain((2, 1, 7), (2, 1, 3), (2,), (1, 1)).attrs()
    grad = te.placeholder((n, 2, out), "float64", name="grad")
    data = te.placeholder((n, 1, size), "float64", name="data")
    weight = te.placeholder((2, 1, 3), "float64", name="weight")
    results = [
        conv_backward_data(grad, weight, data.shape, **attrs, out_dtype="float64"),
        conv_backward_weight(grad, data, weight.shape, **attrs, out_dtype="float64"),
    ]
    kernel = tvm.compile(te.create_prim_func([grad, data, weight, *results]), target=TARGET)
    for batch, extent in ((2, 7), (3, 10), (1, 1), (0, 5)):
        conv = plain((batch, 1, extent), (2, 1, 3), (2,), (1, 1))
        rng = np.random.default_rng(0)
        arrays = [rng.normal(size=shape) for shape in (conv.output, conv.data, conv.weight)]
        fenced = [Fenced(array) for array in (*arrays, np.ones(conv.data), np.ones(conv.weight))]
        kernel(*(item.tensor() for item in fenced))
        assert all(item.intact() for item in fenced)
        for item, expected in zip(fenced[3:], conv.backward(*arrays), strict=True):
            np.testing.assert_allclose(item.array, expected, 1e-12, 1e-12)
