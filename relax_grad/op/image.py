"""The backward operators of resizing and of affine_grid; grid_sample has a separate
module.

Each is linear in the output gradient, and its own gradient is the forward operator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from tvm import relax
from tvm.ir import Op

from ..ir.compat import dtype_of
from ._infer import (
    check_layouts,
    check_shape,
    forward_type,
    shape_values,
    tensor_type,
    type_of_shape,
)
from ._layout import follow_layout_attrs
from .declare import Shape, as_shape, declare_op

_RESIZE_ATTRS = (
    "layout",
    "method",
    "coordinate_transformation_mode",
    "rounding_method",
    "cubic_alpha",
    "cubic_exclude",
    "extrapolation_value",
)


def resize2d_backward_data(
    output_grad: relax.Expr,
    data_shape: relax.Expr | Shape,
    size: relax.Expr | Shape,
    **attrs: object,
) -> relax.Call:
    """Gradient of resize2d with respect to its data.

    Parameters
    ----------
    output_grad : relax.Expr
        The gradient with respect to the result of ``resize2d(data, size, **attrs)``.
    data_shape : relax.Expr or Sequence[int or PrimExpr]
        The shape of the data.
    size : relax.Expr or Sequence[int or PrimExpr]
        As given to ``relax.op.image.resize2d``.
    **attrs
        As given to ``relax.op.image.resize2d``; ``extrapolation_value`` has no effect.
        ``out_dtype`` is the dtype of the result, by default that of ``output_grad``; half precision
        is accumulated in float32.

    Returns
    -------
    result : relax.Call
        A tensor of shape ``data_shape``.
    """
    return _resize_call("resize2d", output_grad, data_shape, size, attrs)


def resize3d_backward_data(
    output_grad: relax.Expr,
    data_shape: relax.Expr | Shape,
    size: relax.Expr | Shape,
    **attrs: object,
) -> relax.Call:
    """Gradient of resize3d with respect to its data.

    Parameters
    ----------
    output_grad, data_shape, size, **attrs
        As for :func:`resize2d_backward_data`.

    Returns
    -------
    result : relax.Call
        A tensor of shape ``data_shape``.
    """
    return _resize_call("resize3d", output_grad, data_shape, size, attrs)


def affine_grid_backward_data(output_grad: relax.Expr, align_corners: bool = True) -> relax.Call:
    """Gradient of affine_grid with respect to its affine matrices.

    Parameters
    ----------
    output_grad : relax.Expr
        The gradient with respect to the result of ``affine_grid(data, size, align_corners)``.
    align_corners : bool
        As given to ``relax.op.image.affine_grid``.

    Returns
    -------
    result : relax.Call
        A tensor of shape ``(batch, 2, 3)``, or ``(batch, 3, 4)`` for grids of three dimensions, in
        the dtype of ``output_grad``; half precision is accumulated in float32.
    """
    attrs = relax.op.image.affine_grid(output_grad, (1, 1), align_corners).attrs
    return relax.Call(Op.get("relax.grad.affine_grid_backward_data"), [output_grad], attrs)


def resize_attrs(call: relax.Call) -> dict:
    """Return the attributes of a resize or of its backward operator, without out_dtype."""
    attrs = {name: getattr(call.attrs, name) for name in _RESIZE_ATTRS}
    return {"roi": [float(bound) for bound in call.attrs.roi], **attrs}


def _resize_call(
    name: str,
    output_grad: relax.Expr,
    data_shape: relax.Expr | Shape,
    size: relax.Expr | Shape,
    attrs: Mapping[str, Any],
) -> relax.Call:
    if "roi" in attrs:  # as floats, which TVMScript does not print
        attrs = {**attrs, "roi": [float(bound) for bound in attrs["roi"]]}
    size = as_shape(size)
    return relax.Call(
        Op.get(f"relax.grad.{name}_backward_data"),
        [output_grad, as_shape(data_shape), size],
        getattr(relax.op.image, name)(output_grad, size, **attrs).attrs,
    )


def _infer_resize(
    builder: Callable, layout: str, call: relax.Call, ctx: relax.BlockBuilder
) -> relax.Type:
    """Infer the type of the backward operator of a resize operator, given its builder and its plain
    layout."""
    output_grad = tensor_type(call, 0, "output_grad")
    data_shape = shape_values(call, 1, "data_shape")
    size = shape_values(call, 2, "size")
    attrs = resize_attrs(call)
    check_layouts(call, layout=(attrs["layout"], layout))
    dtype = str(call.attrs.out_dtype or dtype_of(output_grad))
    ndim = len(attrs["layout"])
    if data_shape is None or size is None:
        return type_of_shape(output_grad, None, ndim, dtype)
    data_type = type_of_shape(output_grad, data_shape, ndim, dtype)
    forward = builder(relax.Var("data", data_type), size, **attrs)
    check_shape(call, "output_grad", output_grad, forward_type(call, ctx, forward))
    return data_type


def _infer_affine_grid(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    output_grad = tensor_type(call, 0, "output_grad")
    shape = output_grad.shape
    if not isinstance(shape, relax.ShapeExpr):
        raise ValueError(f"{call.op.name}: the shape of output_grad must be known: {output_grad}")
    batch, *rest = shape.values
    matrix = [batch, len(rest) - 1, len(rest)]
    data_type = type_of_shape(output_grad, matrix, 3)
    forward = relax.Call(
        Op.get("relax.image.affine_grid"),
        [relax.Var("data", data_type), relax.ShapeExpr(rest[1:])],
        call.attrs,
    )
    check_shape(call, "output_grad", output_grad, forward_type(call, ctx, forward))
    return data_type


for _name, _rank, _layout, _builder in (
    ("resize2d", "2D", "NCHW", resize2d_backward_data),
    ("resize3d", "3D", "NCDHW", resize3d_backward_data),
):
    declare_op(
        f"{_name}_backward_data",
        [
            ("output_grad", "Tensor", f"The gradient with respect to the result of {_name}."),
            ("data_shape", "Shape", "The shape of the data."),
            ("size", "Shape", "The spatial extents of the result."),
        ],
        partial(_infer_resize, getattr(relax.op.image, _name), _layout),
        _builder,
        f"relax.attrs.Resize{_rank}Attrs",
    )
declare_op(
    "affine_grid_backward_data",
    [("output_grad", "Tensor", "The gradient with respect to the result of affine_grid.")],
    _infer_affine_grid,
    affine_grid_backward_data,
    "relax.attrs.AffineGridAttrs",
)
follow_layout_attrs(
    "relax.grad.resize2d_backward_data", "relax.grad.resize3d_backward_data", full=(0,), shape=1
)
