"""The legalizations of image and vision operators where TVM's own are wrong."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from sweep import TARGET
from tvm import relax, tirx
from tvm.relax.op import grad as backward
from versions import REGIONS

from relax_grad.ir.compat import dtype_of

image, vision = relax.op.image, relax.op.vision
RNG = np.random.default_rng(0)


def run(build, *values, types=None):
    """Compile and run a function, and compare the result with its inferred type."""
    types = types or [relax.TensorType(value.shape, value.dtype.name) for value in values]
    params = [relax.Var(f"x{i}", kind) for i, kind in enumerate(types)]
    bb = relax.BlockBuilder()
    with bb.function("main", params):
        with bb.dataflow():
            result = bb.emit_output(build(*params))
        bb.emit_func_output(result)
    machine = relax.VirtualMachine(tvm.compile(bb.get(), TARGET), tvm.cpu())
    output = machine["main"](*map(tvm.runtime.tensor, values)).numpy()
    assert output.dtype.name == dtype_of(result.ty)
    return output


def interpolate(torch, x, size, **settings):
    return torch.nn.functional.interpolate(torch.from_numpy(x), size, **settings).numpy()


def test_resize_of_float64_in_float64(torch):
    x = RNG.normal(size=(1, 2, 3, 4))
    output = run(lambda x: image.resize2d(x, (5, 7)), x)
    expected = interpolate(torch, x, (5, 7), mode="bilinear")
    np.testing.assert_allclose(output, expected, rtol=0, atol=1e-14)


def test_resize_to_another_dtype():
    x = RNG.normal(size=(1, 2, 3, 4)).astype("float32")
    own = run(lambda x: image.resize2d(x, (5, 7)), x)
    output = run(lambda x: image.resize2d(x, (5, 7), out_dtype="float16"), x)
    np.testing.assert_allclose(output, own, rtol=1e-3, atol=1e-3)
    numbers = np.arange(2**24, 2**24 + 4, dtype="int32").reshape(1, 1, 2, 2)
    output = run(
        lambda x: image.resize2d(x, (2, 4), method="nearest_neighbor", out_dtype="float64"),
        numbers,
    )
    np.testing.assert_array_equal(output, np.repeat(numbers, 2, 3))


def test_resize_with_corners_aligned_to_one_element(torch):
    x = RNG.normal(size=(1, 2, 3, 4)).astype("float32")
    expected = interpolate(torch, x, (1, 3), mode="bilinear", align_corners=True)
    h = tirx.Var("h", "int64")
    for size, types in (((1, 3), None), ((h - 2, 3), [relax.TensorType((1, 2, h, 4), "float32")])):
        output = run(
            lambda x, size=size: image.resize2d(
                x, size, coordinate_transformation_mode="align_corners"
            ),
            x,
            types=types,
        )
        np.testing.assert_allclose(output, expected, rtol=1e-6)


def test_resize_in_another_layout_and_to_nothing():
    x = RNG.normal(size=(1, 2, 3, 4)).astype("float32")
    plain = run(lambda x: image.resize2d(x, (5, 7)), x)
    output = run(
        lambda x: image.resize2d(x, (5, 7), layout="NWHC"),
        np.ascontiguousarray(x.transpose(0, 3, 2, 1)),
    )
    np.testing.assert_allclose(output.transpose(0, 3, 2, 1), plain, rtol=1e-5, atol=1e-6)
    assert run(lambda x: image.resize2d(x, (0, 7)), x).shape == (1, 2, 0, 7)


def test_nearest_of_symbolic_images():
    x = RNG.normal(size=(1, 2, 3, 4)).astype("float32")
    h = tirx.Var("h", "int64")
    output = run(
        lambda x: image.resize2d(
            x,
            (6, 8),
            method="nearest_neighbor",
            coordinate_transformation_mode="asymmetric",
            rounding_method="floor",
        ),
        x,
        types=[relax.TensorType((1, 2, h, 4), "float32")],
    )
    np.testing.assert_array_equal(output, x.repeat(2, 2).repeat(2, 3))


@pytest.mark.parametrize(
    "mode",
    [
        "half_pixel",
        "align_corners",
        "asymmetric",
        "pytorch_half_pixel",
        "tf_half_pixel_for_nn",
        "tf_crop_and_resize",
    ],
)
def test_resize_of_symbolic_images_to_symbolic_sizes(mode):
    x = RNG.normal(size=(1, 2, 3, 4))
    h = tirx.Var("h", "int64")
    settings = {"coordinate_transformation_mode": mode, "roi": (0.1, 0.2, 0.9, 0.8)}
    expected = run(lambda x: image.resize2d(x, (5, 7), **settings), x)
    output = run(
        lambda x: image.resize2d(x, (h + 2, 7), **settings),
        x,
        types=[relax.TensorType((1, 2, h, 4), "float64")],
    )
    np.testing.assert_allclose(output, expected, rtol=0, atol=1e-14)
    grad = RNG.normal(size=(1, 2, 5, 7))

    def transpose(shape, size):
        return lambda dy, x: backward.resize2d_backward_data(dy, shape, size, **settings)

    static = run(transpose(x.shape, (5, 7)), grad, x)
    symbolic = run(
        transpose((1, 2, h, 4), (h + 2, 7)),
        grad,
        x,
        types=[
            relax.TensorType((1, 2, h + 2, 7), "float64"),
            relax.TensorType((1, 2, h, 4), "float64"),
        ],
    )
    np.testing.assert_allclose(symbolic, static, rtol=0, atol=1e-14)
    np.testing.assert_allclose(np.sum(symbolic * x), np.sum(grad * expected), atol=1e-12)


def test_resize3d_extrapolates_along_every_axis():
    x = np.ones((1, 1, 3, 3, 3), "float32")
    for axis in range(3):
        roi = np.array([[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
        roi[1, 2 - axis] = 1.5  # a roi lists the last axis first
        output = run(
            lambda x, roi=roi: image.resize3d(
                x,
                (3, 3, 3),
                roi=roi.ravel().tolist(),
                coordinate_transformation_mode="tf_crop_and_resize",
                extrapolation_value=7.0,
            ),
            x,
        )
        expected = np.ones_like(x)
        np.moveaxis(expected, 2 + axis, 0)[2] = 7
        np.testing.assert_allclose(output, expected)


def test_resize3d_that_excludes_the_outside():
    """resize3d must resize an axis as resize2d does."""
    x = RNG.normal(size=(1, 1, 4, 3, 5)).astype("float32")
    settings = {"method": "cubic", "cubic_exclude": 1}
    output = run(lambda x: image.resize3d(x, (7, 3, 5), **settings), x)
    flat = run(lambda x: image.resize2d(x, (7, 15), **settings), x.reshape(1, 1, 4, 15))
    np.testing.assert_allclose(output.reshape(flat.shape), flat, rtol=1e-5, atol=1e-5)


def test_affine_grid_of_one_element_and_of_symbolic_extents():
    theta = RNG.normal(size=(2, 2, 3)).astype("float32")
    output = run(lambda t: image.affine_grid(t, (1, 3)), theta)
    base = np.stack([[-1, 0, 1], [0, 0, 0], [1, 1, 1]])
    np.testing.assert_allclose(output[:, :, 0], theta @ base, rtol=1e-5, atol=1e-6)
    n = tirx.Var("n", "int64")
    symbolic = run(
        lambda t: image.affine_grid(t, (n - 1, n + 1)),
        theta,
        types=[relax.TensorType((n, 2, 3), "float32")],
    )
    np.testing.assert_allclose(symbolic, output, rtol=1e-5, atol=1e-6)


def test_affine_grid_of_half_precision():
    theta = RNG.normal(size=(1, 2, 3)).astype("float16")
    half = run(lambda t: image.affine_grid(t, (3, 700)), theta).astype("float64")
    exact = run(lambda t: image.affine_grid(t, (3, 700)), theta.astype("float64"))
    np.testing.assert_array_less(np.abs(half - exact), 1e-3 * np.abs(exact).max())


def grid_sample(**settings):
    return lambda x, g: image.grid_sample(x, g, **settings)


def test_grid_sample_reflected_at_an_extent_of_1():
    x = RNG.normal(size=(1, 2, 1, 3)).astype("float32")
    grid = np.array([[-3.0, 0.4, 2.0], [5.0, -1.5, 0.0]], "float32").reshape(1, 2, 1, 3)
    settings = {"padding_mode": "reflection", "align_corners": True}
    for method in ("nearest", "bilinear", "bicubic"):
        output = run(grid_sample(method=method, **settings), x, grid)
        row = np.zeros_like(grid)
        row[:, 0] = grid[:, 0]
        expected = run(
            grid_sample(method=method, **settings),
            np.repeat(x, 2, axis=2),  # two equal rows
            row,
        )
        np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-6)


def test_grid_sample_of_half_precision_and_of_two_dtypes():
    x = RNG.normal(size=(1, 1, 3, 900))
    grid = RNG.uniform(-1, 1, (1, 2, 4, 5)).astype("float16")
    exact = run(grid_sample(), x, grid.astype("float64"))
    for dtypes in (("float16", "float16"), ("float16", "float32"), ("float32", "float64")):
        output = run(grid_sample(), x.astype(dtypes[0]), grid.astype(dtypes[1]))
        np.testing.assert_allclose(output, exact, rtol=0, atol=5e-3)


@REGIONS
def test_regions_outside_the_batch_and_without_samples_are_0():
    x = RNG.normal(size=(2, 1, 3, 4)).astype("float32")
    rois = np.array([[2, 0, 0, 3, 2], [-1, 0, 0, 3, 2], [0, 3, 2, 1, 1]], "float32")
    settings = {"pooled_size": 2, "spatial_scale": 1.0}
    for mode in ("avg", "max"):
        output = run(
            lambda x, r, m=mode: vision.roi_align(x, r, aligned=True, mode=m, **settings), x, rois
        )
        np.testing.assert_array_equal(output, 0)
    output = run(lambda x, r: vision.roi_pool(x, r, **settings), x, rois)
    np.testing.assert_array_equal(output[:2], 0)
    np.testing.assert_array_equal(output[2], x[0, :, 2, 3, None, None] * np.ones((1, 2, 2)))


@REGIONS
@pytest.mark.parametrize("mode", ["avg", "max"])
def test_roi_align_of_two_dtypes(mode):
    x = RNG.normal(size=(1, 2, 4, 5))
    rois = np.array([[0, 0.4, 0.2, 3.7, 2.9]])
    settings = {"pooled_size": 2, "spatial_scale": 1.0, "mode": mode}
    exact = run(lambda x, r: vision.roi_align(x, r, **settings), x, rois)
    for dtypes in (("float16", "float32"), ("float32", "float64"), ("float64", "float32")):
        output = run(
            lambda x, r: vision.roi_align(x, r, **settings),
            x.astype(dtypes[0]),
            rois.astype(dtypes[1]),
        )
        np.testing.assert_allclose(output, exact, rtol=0, atol=3e-3)
