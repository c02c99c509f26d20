"""The backward operators of image operators: type inference, errors and round trips."""

from __future__ import annotations

import pytest
import tvm
from calls import type_of
from tvm import relax, tirx
from tvm.relax.op import grad as backward
from tvm.script import from_source
from tvm_ffi import structural_equal


def tensor(*shape, dtype="float32"):
    return relax.TensorType(shape, dtype)


def var(name, *shape, dtype="float32"):
    return relax.Var(name, tensor(*shape, dtype=dtype))


GRID = {"method": "bicubic", "padding_mode": "border", "align_corners": True}
CALLS = {
    "resize2d": (
        [tensor(2, 3, 7, 5, dtype="float16")],
        lambda dy: backward.resize2d_backward_data(
            dy,
            (2, 3, 4, 6),
            (7, 5),
            roi=(0.1, 0.2, 0.9, 1.0),
            method="cubic",
            coordinate_transformation_mode="tf_crop_and_resize",
            cubic_exclude=1,
            out_dtype="float32",
        ),
    ),
    "resize3d": (
        [tensor(2, 3, 7, 5, 1)],
        lambda dy: backward.resize3d_backward_data(
            dy, (2, 4, 6, 2, 1), (3, 7, 5), layout="NDHWC", rounding_method="ceil"
        ),
    ),
    "affine_grid": (
        [tensor(2, 2, 7, 5)],
        lambda dy: backward.affine_grid_backward_data(dy, align_corners=False),
    ),
    "grid_sample, data": (
        [tensor(2, 3, 7, 5), tensor(2, 2, 7, 5)],
        lambda dy, g: backward.grid_sample_backward_data(dy, (2, 3, 4, 6), g, **GRID),
    ),
    "grid_sample, grid, along a direction": (
        [tensor(2, 3, 7, 5), tensor(2, 3, 4, 6), tensor(2, 2, 7, 5)],
        lambda dy, x, g: backward.grid_sample_backward_grid(dy, x, g, [g], **GRID),
    ),
    "grid_sample, along two directions": (
        [tensor(2, 3, 4, 6), tensor(2, 2, 7, 5)],
        lambda x, g: backward.grid_sample_jvp(x, g, (g, g), **GRID),
    ),
}


def module(types, build):
    params = [relax.Var(f"x{i}", kind) for i, kind in enumerate(types)]
    bb = relax.BlockBuilder()
    with bb.function("main", params):
        with bb.dataflow():
            result = bb.emit_output(build(*params))
        bb.emit_func_output(result)
    return bb.get()


@pytest.mark.parametrize("name", CALLS)
def test_round_trip(name):
    mod = module(*CALLS[name])
    assert structural_equal(from_source(mod.script(show_meta=True)), mod)
    assert structural_equal(tvm.ir.load_json(tvm.ir.save_json(mod)), mod)


def test_result_types():
    n = tirx.Var("n", "int64")
    x, dy, grid = var("x", n, 3, 4, 6), var("dy", n, 3, 7, 5), var("g", n, 2, 7, 5)
    half = var("dy", n, 3, 7, 5, dtype="float16")
    shape = relax.ShapeExpr([n, 3, 4, 6])
    for call, expected in (
        (backward.resize2d_backward_data(dy, shape, (7, 5)), x.ty),
        (backward.resize2d_backward_data(half, shape, (7, 5), out_dtype="float32"), x.ty),
        (backward.grid_sample_backward_data(dy, shape, grid), x.ty),
        (backward.grid_sample_backward_grid(dy, x, grid, [grid]), grid.ty),
        (backward.grid_sample_jvp(x, grid, [grid]), dy.ty),
        (backward.affine_grid_backward_data(grid), tensor(n, 2, 3)),
        (backward.affine_grid_backward_data(var("g", n, 3, 2, 7, 5)), tensor(n, 3, 4)),
    ):
        tvm.ir.assert_structural_equal(type_of(call), expected, map_free_vars=True)


DY, X, G = var("dy", 2, 3, 7, 5), var("x", 2, 3, 4, 6), var("g", 2, 2, 7, 5)
SHAPE = (2, 3, 4, 6)
WRONG = {
    "another size": (
        lambda: backward.resize2d_backward_data(DY, SHAPE, (7, 6)),
        ValueError,
        r"output_grad must have the shape \(2, 3, 7, 6\).*but it has \(2, 3, 7, 5\)",
    ),
    "packed channels": (
        lambda: backward.resize2d_backward_data(DY, SHAPE, (7, 5), layout="NCHW4c"),
        ValueError,
        "layout must be a permutation of 'NCHW'.*unpacked",
    ),
    "a tensor for a shape": (
        lambda: backward.resize2d_backward_data(DY, X, (7, 5)),
        TypeError,
        "data_shape must be a shape",
    ),
    "two sizes of three": (
        lambda: backward.resize3d_backward_data(var("dy", 1, 1, 2, 2, 2), (1, 1, 2, 2, 2), (2, 2)),
        ValueError,
        "do not fit relax.image.resize3d",
    ),
    "affine_grid of four dimensions": (
        lambda: backward.affine_grid_backward_data(var("g", 1, 4, 2, 2, 2, 2)),
        ValueError,
        "do not fit relax.image.affine_grid",
    ),
    "affine_grid with two rows for three dimensions": (
        lambda: backward.affine_grid_backward_data(var("g", 1, 2, 2, 2, 2)),
        ValueError,
        r"output_grad must have the shape \(1, 3, 2, 2, 2\)",
    ),
    "grid of three coordinates": (
        lambda: backward.grid_sample_jvp(X, var("g", 2, 3, 7, 5)),
        ValueError,
        "2 coordinates along axis 1",
    ),
    "grid of rank 5": (
        lambda: backward.grid_sample_jvp(X, var("g", 2, 2, 7, 5, 1)),
        ValueError,
        "grid must have 4 dimensions",
    ),
    "another batch": (
        lambda: backward.grid_sample_backward_data(DY, (3, 3, 4, 6), G),
        ValueError,
        "same batch",
    ),
    "another grid's gradient": (
        lambda: backward.grid_sample_backward_grid(var("dy", 2, 3, 7, 6), X, G),
        ValueError,
        r"output_grad must have the shape \(2, 3, 7, 5\)",
    ),
    "gradient of another dtype": (
        lambda: backward.grid_sample_backward_grid(var("dy", 2, 3, 7, 5, dtype="float16"), X, G),
        TypeError,
        "dtype of the data",
    ),
    "direction of another shape": (
        lambda: backward.grid_sample_jvp(X, G, [var("k", 2, 2, 7, 6)]),
        ValueError,
        "a direction must have the shape",
    ),
    "direction of another dtype": (
        lambda: backward.grid_sample_jvp(X, G, [var("k", 2, 2, 7, 5, dtype="float16")]),
        TypeError,
        "a direction must have the type of the grid",
    ),
    "directions that are no tuple": (
        lambda: backward.grid_sample_jvp(X, G, G),
        TypeError,
        "directions must be a tuple",
    ),
    "layout": (
        lambda: backward.grid_sample_jvp(X, G, layout="NHWC"),
        ValueError,
        "layout must be one of",
    ),
    "bicubic in three dimensions": (
        lambda: backward.grid_sample_jvp(
            var("x", 1, 1, 2, 2, 2), var("g", 1, 3, 2, 2, 2), layout="NCDHW", method="bicubic"
        ),
        ValueError,
        r"method must be one of \('nearest', 'bilinear'\)",
    ),
    "padding mode": (
        lambda: backward.grid_sample_jvp(X, G, padding_mode="wrap"),
        ValueError,
        "padding_mode must be one of",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_mismatched_arguments_are_refused(case):
    build, error, message = WRONG[case]
    with pytest.raises(error, match=message):
        type_of(build())
