"""The backward operators of layout_transform and pixel_shuffle.

Each is linear in the output gradient, and its own gradient is the forward operator.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import relax, tirx
from tvm.ir import Op
from tvm.tirx import IndexMap

from ..registry import register_infer_type
from ._infer import infer_data, type_of_shape, unused
from .declare import Shape, as_shape, declare_op


def layout_transform_backward_x(
    output_grad: relax.Expr,
    x_shape: relax.Expr | Shape,
    index_map: Callable | IndexMap,
    **unused_attrs: object,
) -> relax.Call:
    """Gradient of layout_transform with respect to its data.

    Parameters
    ----------
    output_grad : relax.Expr
        The gradient with respect to the result of ``layout_transform(x, index_map)``.
    x_shape : relax.Expr or Sequence[int or PrimExpr]
        The shape of the data.
    index_map : Callable or IndexMap
        As given to ``relax.op.layout_transform``.
    **unused_attrs
        The other attributes of ``relax.op.layout_transform``, on which its gradient does not
        depend.

    Returns
    -------
    result : relax.Call
        A tensor of shape ``x_shape`` and the dtype of ``output_grad``, without the elements of the
        padding.
    """
    return relax.Call(
        Op.get("relax.grad.layout_transform_backward_x"),
        [output_grad, as_shape(x_shape)],
        relax.op.layout_transform(unused(), index_map).attrs,
    )


def pixel_shuffle_backward_data(
    output_grad: relax.Expr, data_shape: relax.Expr | Shape, upscale_factor: int
) -> relax.Call:
    """Gradient of pixel_shuffle with respect to its data.

    Parameters
    ----------
    output_grad : relax.Expr
        The gradient with respect to the result of ``nn.pixel_shuffle(data, upscale_factor)``.
    data_shape : relax.Expr or Sequence[int or PrimExpr]
        The shape of the data.
    upscale_factor : int
        As given to ``relax.op.nn.pixel_shuffle``.

    Returns
    -------
    result : relax.Call
        A tensor of shape ``data_shape`` and the dtype of ``output_grad``.
    """
    return relax.Call(
        Op.get("relax.grad.pixel_shuffle_backward_data"),
        [output_grad, as_shape(data_shape)],
        relax.op.nn.pixel_shuffle(unused(), upscale_factor).attrs,
    )


_tvm_infer_pixel_shuffle = Op.get("relax.nn.pixel_shuffle").get_attr("FInferType")


@register_infer_type(
    "relax.nn.pixel_shuffle",
    corrects=(
        "crashes the process for a symbolic number of channels, and for a shape that is a variable"
    ),
)
def _infer_pixel_shuffle(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    data, factor = call.args[0].ty, int(call.attrs.upscale_factor)
    if not isinstance(data, relax.TensorType) or data.shape is None or data.ndim < 3 or factor < 1:
        return _tvm_infer_pixel_shuffle(call, ctx)
    if not isinstance(data.shape, relax.ShapeExpr):
        return type_of_shape(data, None, data.ndim)
    *batch, channels, height, width = data.shape.values
    if isinstance(channels, tirx.IntImm):
        return _tvm_infer_pixel_shuffle(call, ctx)
    # If the number of channels is not divisible, the last ones are dropped.
    shape = [*batch, channels // (factor * factor), height * factor, width * factor]
    return type_of_shape(data, shape, data.ndim)


def _infer_layout_transform(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    return infer_data(call, ctx, "relax.layout_transform", "x_shape")


def _infer_pixel_shuffle_backward(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    return infer_data(call, ctx, "relax.nn.pixel_shuffle")


declare_op(
    "layout_transform_backward_x",
    [
        ("output_grad", "Tensor", "The gradient with respect to the result of layout_transform."),
        ("x_shape", "Shape", "The shape of the data."),
    ],
    _infer_layout_transform,
    layout_transform_backward_x,
    "relax.attrs.LayoutTransformAttrs",
)
declare_op(
    "pixel_shuffle_backward_data",
    [
        ("output_grad", "Tensor", "The gradient with respect to the result of pixel_shuffle."),
        ("data_shape", "Shape", "The shape of the data."),
    ],
    _infer_pixel_shuffle_backward,
    pixel_shuffle_backward_data,
    "relax.attrs.PixelShuffleAttrs",
)
