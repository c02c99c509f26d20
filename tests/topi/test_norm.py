"""Tensor expressions for the normalisations."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from sweep import TARGET
from tvm import te, tirx

from relax_grad.topi import norm
from relax_grad.topi.norm import divide_by_count


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_the_count_is_not_rounded_to_the_dtype(dtype):
    """The count 70000 is infinite in float16."""
    n = tirx.Var("n", "int64")
    like = te.placeholder((n, 7), "int8", "like")
    data = te.placeholder((2,), dtype, "data")
    function = tvm.compile(
        te.create_prim_func([data, like, divide_by_count(data, like.shape, [0, 1])]), target=TARGET
    )
    values = np.array([6e4, -1.0], dtype)
    out = tvm.runtime.tensor(np.zeros(2, dtype))
    function(tvm.runtime.tensor(values), tvm.runtime.tensor(np.zeros((10000, 7), "int8")), out)
    wide = "float64" if dtype == "float64" else "float32"
    expected = (values.astype(wide) / np.dtype(wide).type(70000)).astype(dtype)
    np.testing.assert_array_equal(out.numpy(), expected)


def rows(shape, axes):
    return tuple(1 if axis in axes else extent for axis, extent in enumerate(shape))


def over_axes(kind, gamma=True, mean=True):
    """Return a case of layer_norm or rms_norm: the argument shapes, the expression and its NumPy
    definition."""

    def case(shape, axes):
        order = sorted(range(len(axes)), key=axes.__getitem__)
        others = [axis for axis in range(len(shape)) if axis not in axes]
        shapes = {"dy": shape, "x": shape}
        shapes |= {"gamma": tuple(shape[axis] for axis in axes)} if gamma else {}
        shapes |= {"mean": rows(shape, axes)} if mean else {}
        shapes["rstd"] = rows(shape, axes)

        def compute(dy, x, rstd, gamma=None, mean=None):
            if kind == "gamma":
                return norm.norm_backward_gamma(dy, x, mean, rstd, axes, axes)
            if mean is not None:
                return norm.row_norm_backward_data(dy, x, gamma, mean, rstd, axes)
            sums = norm.rms_norm_row_sums(dy, x, gamma, rstd, axes)
            return norm.row_norm_backward_data(dy, x, gamma, None, rstd, axes, sums)

        def define(dy, x, rstd, gamma=None, mean=None):
            z = (x - (0 if mean is None else mean)) * rstd
            if kind == "gamma":
                total = (dy * z).sum(tuple(others))
                return np.transpose(total, [sorted(axes).index(axis) for axis in axes])
            g = dy
            if gamma is not None:
                g = dy * np.expand_dims(np.transpose(gamma, order), others)
            average = {"axis": tuple(axes), "keepdims": True}
            shift = 0 if mean is None else g.mean(**average)
            return rstd * (g - shift - z * (g * z).mean(**average))

        return shapes, compute, define

    return case


def affine(statistics, kind, gamma=True):
    """Return a case of batch_norm or instance_norm with channels on axis 1; batch_norm ignores
    ``axes``."""

    def case(shape, axes):
        batch = statistics == "channels"
        others = tuple(axis for axis in range(len(shape)) if axis != 1) if batch else tuple(axes)
        of_row = (shape[1],) if batch else rows(shape, axes)
        shapes = {"dy": shape, "x": shape, "mean": of_row, "rstd": of_row}
        if kind == "data":
            shapes |= {"mean_grad": of_row, "variance_grad": of_row}
            shapes |= {"gamma": (shape[1],)} if gamma else {}

        def compute(dy, x, mean, rstd, mean_grad=None, variance_grad=None, gamma=None):
            if kind == "gamma":
                kept = [1] if batch else None
                return norm.norm_backward_gamma(dy, x, mean, rstd, others, kept)
            of_row = (mean, rstd, mean_grad, variance_grad)
            return norm.channel_norm_backward_data(dy, x, gamma, *of_row, 1, others)

        def define(dy, x, mean, rstd, mean_grad=None, variance_grad=None, gamma=None):
            count = np.prod([x.shape[axis] for axis in others])
            own = [-1 if axis == 1 else 1 for axis in range(len(shape))]

            def spread(value):
                return value.reshape(own) if batch else value

            z = (x - spread(mean)) * spread(rstd)
            if kind == "gamma":
                return (dy * z).sum(others, keepdims=not batch)
            factor = spread(rstd) * (1 if gamma is None else gamma.reshape(own))
            centered = x - spread(mean)
            through = spread(mean_grad) + 2 * spread(variance_grad) * centered
            return factor * dy + through / count

        return shapes, compute, define

    return case


CASES = {
    "layer_norm data": over_axes("data"),
    "layer_norm data, no factors": over_axes("data", gamma=False),
    "layer_norm gamma": over_axes("gamma", gamma=False),
    "rms_norm data": over_axes("data", mean=False),
    "rms_norm weight": over_axes("gamma", gamma=False, mean=False),
    "batch_norm data": affine("channels", "data"),
    "batch_norm data, no factors": affine("channels", "data", gamma=False),
    "batch_norm gamma": affine("channels", "gamma"),
    "instance_norm data": affine("rows", "data"),
    "instance_norm gamma": affine("rows", "gamma"),
}
WIDE_RESULTS = ("gamma", "weight")


def build(case, shape, axes, dtype, wide):
    """Return the function of a case, with data of ``dtype`` and statistics of ``wide``, its shapes
    and definition."""
    shapes, compute, define = case(shape, axes)
    inputs = {
        name: te.placeholder(extents, wide if i > 1 else dtype, name)
        for i, (name, extents) in enumerate(shapes.items())
    }
    return te.create_prim_func([*inputs.values(), compute(**inputs)]), shapes, define


def values_of(shapes, dtype, wide):
    rng = np.random.default_rng(0)
    return {
        name: rng.normal(size=extents).astype(wide if i > 1 else dtype)
        for i, (name, extents) in enumerate(shapes.items())
    }


def check(function, define, values, dtype, tolerance):
    expected = define(**{name: value.astype("float64") for name, value in values.items()})
    out = tvm.runtime.tensor(np.full(expected.shape, np.nan, dtype))
    function(*map(tvm.runtime.tensor, values.values()), out)
    np.testing.assert_allclose(out.numpy().astype("float64"), expected, tolerance, tolerance)


@pytest.mark.parametrize("name", CASES)
def test_dense_definition(name):
    for shape, axes in (((3, 4, 2), [2]), ((2, 3, 4), [2, 0]), ((3, 2), [])):
        function, shapes, define = build(CASES[name], shape, axes, "float64", "float64")
        values = values_of(shapes, "float64", "float64")
        check(tvm.compile(function, target=TARGET), define, values, "float64", 1e-12)


@pytest.mark.parametrize("name", CASES)
def test_half_precision_is_computed_in_float32(name):
    """A float16 sum of 4096 products of about 1 is wrong."""
    function, shapes, define = build(CASES[name], (2, 2, 4096), [2], "float16", "float32")
    values = values_of(shapes, "float16", "float32")
    values["dy"] = np.abs(values["dy"])
    values["x"] = np.abs(values["x"]) + values["x"].dtype.type(2)
    dtype = "float32" if name.endswith(WIDE_RESULTS) else "float16"
    check(tvm.compile(function, target=TARGET), define, values, dtype, 2e-3)


@pytest.mark.parametrize("name", CASES)
def test_symbolic_extents_that_may_be_empty(name):
    """A sum of no elements is 0, and a result without elements is not written."""
    n, m = (tirx.Var(name, "int64") for name in "nm")
    function, _, define = build(CASES[name], (n, 3, m), [2], "float32", "float32")
    function = tvm.compile(function, target=TARGET)
    for shape in ((2, 3, 5), (0, 3, 2), (2, 3, 0)):
        shapes, _, define = CASES[name](shape, [2])
        if 0 in shape and not name.endswith(WIDE_RESULTS):

            def define(dy, **_):  # the result has no elements
                return dy

        check(function, define, values_of(shapes, "float32", "float32"), "float32", 1e-4)


@pytest.mark.parametrize("name", CASES)
def test_nothing_of_the_size_of_the_data_is_written_but_the_result(name):
    function, _, _ = build(CASES[name], (8, 6, 10), [2], "float16", "float32")
    sizes = [
        int(np.prod([int(extent) for extent in buffer.shape]))
        for buffer in function.body.block.alloc_buffers
    ]
    assert max(sizes, default=0) < 8 * 6 * 10
