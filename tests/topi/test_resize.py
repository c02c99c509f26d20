"""The transpose of a resize against the Jacobian of TVM's resize and of ours."""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels import Kernel, check_kernels, run_kernels
from sweep import TARGET, at_length, batches
from tvm import te, tirx, topi

from relax_grad.topi import resize as topi_resize

MODES = (
    "half_pixel",
    "align_corners",
    "asymmetric",
    "pytorch_half_pixel",
    "tf_half_pixel_for_nn",
    "tf_crop_and_resize",
)
ROUNDINGS = ("", "round", "round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
SIZES = [(1, 1), (1, 4), (5, 1), (2, 7), (7, 2), (4, 4), (3, 6), (6, 3), (3, 5), (9, 5)]


def attrs(mode, method, rounding="", **others):
    return {
        "method": method,
        "coordinate_transformation_mode": mode,
        "rounding_method": rounding,
        "roi": [0.1, 0.3, 0.9, 0.8],
        "cubic_alpha": -0.75,
        "cubic_exclude": 0,
        **others,
    }


def compiled(*tensors):
    return tvm.compile(te.create_prim_func(list(tensors)), target=TARGET)


def call(function, shape, *inputs, dtype="float32"):
    tensors = [tvm.runtime.tensor(value) for value in inputs]
    out = tvm.runtime.empty(shape, dtype)
    function(*tensors, out)
    return out.numpy()


def unit_images(extents):
    count = math.prod(extents)
    return np.eye(count, dtype="float32").reshape(count, 1, *extents)


def stock(data, size, settings):
    settings = dict(settings)
    settings["bicubic_alpha"] = settings.pop("cubic_alpha")
    settings["bicubic_exclude"] = settings.pop("cubic_exclude")
    return topi.image.resize2d(
        data, size=[tirx.IntImm("int64", extent) for extent in size], **settings
    )


def ours(data, size, settings):
    layout = "NCHW" if len(size) == 2 else "NCDHW"
    return topi_resize.resize(data, size, layout, "float32", 0.0, **settings)


def check_transposes(cases, target=TARGET):
    """Assert that the backward function of unit images is the transposed Jacobian of the forward
    one."""
    forward = [
        Kernel(
            functools.partial(forward_of(extents, size, settings), size=size, settings=settings),
            [unit_images(extents)],
            np.empty((math.prod(extents), 1, *size)),
            "float32",
        )
        for extents, size, settings in cases
    ]
    backward = [
        Kernel(
            functools.partial(
                topi_resize.resize_backward_data,
                data_shape=(math.prod(size), 1, *extents),
                layout="NCHW" if len(size) == 2 else "NCDHW",
                out_dtype="float32",
                **settings,
            ),
            [unit_images(size)],
            jacobian.reshape(len(jacobian), -1).T.reshape(-1, 1, *extents),
            "float32",
            0.0 if settings["method"] == "nearest_neighbor" else 2e-6,
        )
        for (extents, size, settings), jacobian in zip(
            cases, run_kernels(forward, target), strict=True
        )
    ]
    check_kernels(backward, target)


def forward_of(extents, size, settings):
    """Return TVM's resize for images, and ours where TVM's is wrong.

    TVM divides by zero if it aligns corners, of the data or of a region, to one element. It
    extrapolates volumes along one axis only.
    """
    mode = settings["coordinate_transformation_mode"]
    alone = mode in ("align_corners", "tf_crop_and_resize") and 1 in (*extents, *size)
    return ours if alone or len(extents) == 3 else stock


def one_of(cases):
    return st.sampled_from(list(cases))


nearest = st.builds(
    lambda mode, rounding: attrs(mode, "nearest_neighbor", rounding),
    one_of(MODES),
    one_of(ROUNDINGS),
)
smooth = st.builds(
    lambda mode, method, exclude: attrs(mode, method, cubic_exclude=exclude),
    one_of(MODES),
    one_of(["linear", "cubic"]),
    one_of([0, 1]),
)


@st.composite
def cases(draw, largest=9):
    """Draw the extents and the size of an image, or sometimes of a volume, and the settings."""
    settings = draw(st.one_of(nearest, smooth))
    if draw(st.integers(0, 3)) == 0:
        settings["roi"] = [0.1, 0.2, 0.3, 0.9, 0.7, 0.8]
        if settings["method"] == "cubic":  # 64 taps take seconds to compile
            settings["method"] = "linear"
        extents, size = (draw(st.tuples(*[st.integers(1, 4)] * 3)) for _ in range(2))
    else:
        extents, size = (draw(st.tuples(*[st.integers(1, largest)] * 2)) for _ in range(2))
    return extents, size, settings


@settings(max_examples=25, deadline=None, derandomize=True)
@given(cases())
def test_transpose_of_forward(case):
    check_transposes([case])


@pytest.mark.slow
@at_length(800)
@given(batches(cases(largest=12)))
def test_transpose_of_forward_at_length(batch):
    check_transposes(batch, TARGET)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "rounding"), [*itertools.product(MODES, ROUNDINGS)])
def test_ties_of_nearest(mode, rounding):
    check_transposes(
        [(size, size[::-1], attrs(mode, "nearest_neighbor", rounding)) for size in SIZES]
    )


@pytest.mark.parametrize("method", ["nearest_neighbor", "linear", "cubic"])
def test_window_holds_every_tap_of_large_extents(method):
    """The ratio is neither an integer nor small, and integers computed at run time bound the
    window."""
    for extent, size in ((257, 1000), (1000, 257), (3, 500), (500, 3), (99, 100)):
        settings = attrs("half_pixel", method, "round")
        data = te.placeholder((1, 1, 1, extent), "float32", "data")
        grad = te.placeholder((1, 1, 1, size), "float32", "grad")
        x = np.random.default_rng(0).normal(size=(1, 1, 1, extent)).astype("float32")
        g = np.random.default_rng(1).normal(size=(1, 1, 1, size)).astype("float32")
        y = call(compiled(data, stock(data, (1, size), settings)), g.shape, x)
        dx = call(
            compiled(
                grad,
                topi_resize.resize_backward_data(grad, x.shape, "NCHW", "float32", **settings),
            ),
            x.shape,
            g,
        )
        np.testing.assert_allclose(
            np.sum(y.astype("float64") * g), np.sum(dx.astype("float64") * x), rtol=1e-4
        )


def test_half_precision_is_accumulated_in_float32():
    settings = attrs("half_pixel", "nearest_neighbor", "round")
    grad = te.placeholder((1, 1, 64, 65), "float16", "grad")
    backward = topi_resize.resize_backward_data(grad, (1, 1, 1, 1), "NCHW", "float16", **settings)
    result = call(
        compiled(grad, backward), (1, 1, 1, 1), np.ones((1, 1, 64, 65), "float16"), dtype="float16"
    )
    assert result.item() == 4160


def test_nan_reaches_only_the_taps_of_its_position():
    settings = attrs("half_pixel", "linear")
    grad = te.placeholder((1, 1, 1, 12), "float32", "grad")
    backward = topi_resize.resize_backward_data(grad, (1, 1, 1, 6), "NCHW", "float32", **settings)
    value = np.zeros((1, 1, 1, 12), "float32")
    value[..., 0] = np.nan
    value[..., 11] = np.inf
    result = call(compiled(grad, backward), (1, 1, 1, 6), value).ravel()
    assert np.isnan(result[0])
    assert np.isinf(result[5])
    np.testing.assert_array_equal(result[1:5], 0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"method": "area"}, "unknown method 'area'"),
        ({"coordinate_transformation_mode": "x"}, "unknown coordinate_transformation_mode 'x'"),
        ({"rounding_method": "up"}, "unknown rounding_method 'up'"),
    ],
)
def test_unknown_settings_are_refused(wrong, message):
    grad = te.placeholder((1, 1, 2, 2), "float32", "grad")
    settings = {**attrs("half_pixel", "nearest_neighbor"), **wrong}
    with pytest.raises(ValueError, match=message):
        topi_resize.resize_backward_data(grad, (1, 1, 3, 3), "NCHW", "float32", **settings)
