"""Legalization of resizing, affine_grid and grid_sample, and of their backward operators."""

from __future__ import annotations

from collections.abc import Callable

from tvm import relax, tirx

from ..ir.compat import dtype_of
from ..ir.dtypes import HALVES
from ..ir.module import short_name, tuple_fields
from ..op.grid_sample import grid_sample_attrs
from ..op.image import resize_attrs
from ..registry import register_legalize
from ..topi import affine_grid as topi_affine_grid
from ..topi import grid_sample as topi_grid_sample
from ..topi import resize as topi_resize
from ..topi import util as topi_util
from ._gpu import bind_threads
from ._util import shape_values, stock

_STOCK_RESIZE2D = stock("relax.image.resize2d")
_STOCK_RESIZE3D = stock("relax.image.resize3d")
_STOCK_AFFINE_GRID = stock("relax.image.affine_grid")
_STOCK_GRID_SAMPLE = stock("relax.image.grid_sample")

_RESIZE_WRONG = (
    "ignores out_dtype, computes float64 in float32, refuses an empty result, align_corners and "
    "regions of one element, and nearest_neighbor of symbolic extents; {}"
)


@register_legalize(
    "relax.image.resize2d", corrects=_RESIZE_WRONG.format("supports the layouts NCHW and NHWC only")
)
def _resize2d(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    if _stock_resize_is_right(call, ("NCHW", "NHWC")):
        return _STOCK_RESIZE2D(bb, call)
    return _call_resize(bb, call)


@register_legalize(
    "relax.image.resize3d",
    corrects=_RESIZE_WRONG.format("mixes up the axes in cubic_exclude and in extrapolation"),
)
def _resize3d(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    attrs = call.attrs
    right = attrs.coordinate_transformation_mode != "tf_crop_and_resize" and not (
        attrs.method.lower() == "cubic" and attrs.cubic_exclude
    )
    if right and _stock_resize_is_right(call, ("NCDHW", "NDHWC")):
        return _STOCK_RESIZE3D(bb, call)
    return _call_resize(bb, call)


@register_legalize("relax.grad.resize2d_backward_data")
@register_legalize("relax.grad.resize3d_backward_data")
def _resize_backward_data(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    attrs = resize_attrs(call)
    del attrs["extrapolation_value"]
    return bb.call_te(
        topi_resize.resize_backward_data,
        call.args[0],
        shape_values(call.args[1]),
        out_dtype=dtype_of(call.ty),
        **attrs,
        primfunc_name_hint=short_name(call),
    )


@register_legalize(
    "relax.image.affine_grid",
    corrects="refuses symbolic extents and align_corners for an extent of 1, and computes half "
    "precision in half precision",
)
def _affine_grid(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    size = shape_values(call.args[1])
    smallest = 2 if call.attrs.align_corners else 1
    if not _is_half(call.args[0]) and all(
        isinstance(extent, tirx.IntImm) and int(extent) >= smallest for extent in size
    ):
        return _STOCK_AFFINE_GRID(bb, call)
    return bb.call_te(
        topi_affine_grid.affine_grid,
        call.args[0],
        size,
        bool(call.attrs.align_corners),
        primfunc_name_hint="affine_grid",
    )


@register_legalize("relax.grad.affine_grid_backward_data")
def _affine_grid_backward_data(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return bb.call_te(
        topi_affine_grid.affine_grid_backward_data,
        call.args[0],
        bool(call.attrs.align_corners),
        primfunc_name_hint="affine_grid_backward_data",
    )


@register_legalize(
    "relax.image.grid_sample",
    corrects="divides by zero in reflection with align_corners at an extent of 1, computes "
    "coordinates of half precision in half precision, and returns the grid's dtype "
    "where it is wider than the data's",
)
def _grid_sample(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    data, grid = call.args
    attrs = call.attrs
    divides = attrs.padding_mode == "reflection" and attrs.align_corners
    if (
        dtype_of(data.ty) == dtype_of(grid.ty)
        and not _is_half(data)
        and not topi_util.is_empty(data.ty.shape.values)
        and not (divides and not all(map(_above_1, data.ty.shape.values[2:])))
    ):
        return _STOCK_GRID_SAMPLE(bb, call)
    sampled = _call_grid_sample(bb, topi_grid_sample.grid_sample_jvp, call, data, grid, [])
    return bind_threads(bb, sampled)


@register_legalize("relax.grad.grid_sample_jvp")
def _grid_sample_jvp(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    data, grid, *directions = call.args
    tangent = _call_grid_sample(
        bb, topi_grid_sample.grid_sample_jvp, call, data, grid, _fields(directions)
    )
    return bind_threads(bb, tangent)


@register_legalize("relax.grad.grid_sample_backward_data")
def _grid_sample_backward_data(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    output_grad, data_shape, grid, *directions = call.args
    return _call_grid_sample(
        bb,
        topi_grid_sample.grid_sample_backward_data,
        call,
        output_grad,
        grid,
        _fields(directions),
        shape_values(data_shape),
    )


@register_legalize("relax.grad.grid_sample_backward_grid")
def _grid_sample_backward_grid(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    output_grad, data, grid, *directions = call.args
    return _call_grid_sample(
        bb,
        topi_grid_sample.grid_sample_backward_grid,
        call,
        output_grad,
        data,
        grid,
        _fields(directions),
    )


def _call_resize(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return bb.call_te(
        topi_resize.resize,
        call.args[0],
        shape_values(call.args[1]),
        out_dtype=dtype_of(call.ty),
        **resize_attrs(call),
        primfunc_name_hint=short_name(call),
    )


def _call_grid_sample(
    bb: relax.BlockBuilder, function: Callable, call: relax.Call, *arguments: relax.Expr
) -> relax.Expr:
    attrs = grid_sample_attrs(call)
    del attrs["layout"]
    return bb.call_te(function, *arguments, **attrs, primfunc_name_hint=short_name(call))


def _stock_resize_is_right(call: relax.Call, layouts: tuple[str, str]) -> bool:
    data, attrs = call.args[0], call.attrs
    mode = attrs.coordinate_transformation_mode
    packed = len(attrs.layout) > len(layouts[0])  # TVM supports or rejects packed layouts itself
    symbolic = not all(isinstance(extent, tirx.IntImm) for extent in data.ty.shape.values)
    return (
        (packed or attrs.layout in layouts)
        and dtype_of(call.ty) == dtype_of(data.ty) != "float64"
        and not topi_util.is_empty(call.ty.shape.values)
        and (
            mode not in ("align_corners", "tf_crop_and_resize")
            or all(map(_above_1, shape_values(call.args[1])))
        )
        and not (mode == "asymmetric" and symbolic)
    )


def _above_1(extent: tirx.PrimExpr) -> bool:
    return isinstance(extent, tirx.IntImm) and int(extent) > 1


def _is_half(tensor: relax.Expr) -> bool:
    return dtype_of(tensor.ty) in HALVES


def _fields(directions: list[relax.Expr]) -> list[relax.Expr]:
    """Return the elements of an optional tuple."""
    return tuple_fields(*directions) if directions else []
