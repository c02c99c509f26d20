"""The backward operators of strided slices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tvm import relax, tirx
from tvm.ir import Op
from tvm.relax.utils import convert_to_expr

from ._infer import infer_data, tensor_type
from ._layout import Converted, layout_rule, moved_axes, moved_shape
from .declare import Shape, as_shape, declare_op


def strided_slice_backward_data(
    output_grad: relax.Expr,
    data_shape: relax.Expr | Shape,
    axes: relax.Expr | Sequence[int],
    begin: relax.Expr | Sequence[int | tirx.PrimExpr],
    end: relax.Expr | Sequence[int | tirx.PrimExpr],
    strides: relax.Expr | Sequence[int | tirx.PrimExpr],
    assume_inbound: bool = False,
) -> relax.Call:
    """Gradient of strided_slice with respect to its data.

    Parameters
    ----------
    output_grad : relax.Expr
        The gradient with respect to the result of
        ``strided_slice(data, axes, begin, end, strides)``.
    data_shape : relax.Expr or Sequence[int or PrimExpr]
        The shape of the data.
    axes, begin, end, strides, assume_inbound
        As given to ``relax.op.strided_slice``.

    Returns
    -------
    result : relax.Call
        A tensor of shape ``data_shape`` in the dtype of ``output_grad``.
    """
    axes, begin, end, strides = map(convert_to_expr, (axes, begin, end, strides))
    attrs = relax.op.strided_slice(output_grad, axes, begin, end, strides, assume_inbound).attrs
    return relax.Call(
        Op.get("relax.grad.strided_slice_backward_data"),
        [output_grad, as_shape(data_shape), axes, begin, end, strides],
        attrs,
    )


def dynamic_strided_slice_backward_data(
    output_grad: relax.Expr,
    data_shape: relax.Expr | Shape,
    begin: relax.Expr,
    end: relax.Expr,
    strides: relax.Expr,
) -> relax.Call:
    """Gradient of dynamic_strided_slice with respect to its data.

    Parameters
    ----------
    output_grad : relax.Expr
        The gradient with respect to the result of ``dynamic_strided_slice(data, begin, end,
        strides)``. Its shape may be unknown at compile time.
    data_shape : relax.Expr or Sequence[int or PrimExpr]
        The shape of the data.
    begin, end, strides : relax.Expr
        As given to ``relax.op.dynamic_strided_slice``.

    Returns
    -------
    result : relax.Call
        A tensor of shape ``data_shape`` in the dtype of ``output_grad``.
    """
    return relax.Call(
        Op.get("relax.grad.dynamic_strided_slice_backward_data"),
        [output_grad, as_shape(data_shape), begin, end, strides],
    )


def _infer_strided_slice_backward(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    for i, name in enumerate(("axes", "begin", "end", "strides"), start=2):
        if not isinstance(call.args[i].ty, relax.TupleType):
            raise TypeError(
                f"{call.op.name}: {name} must be a tuple of integers, but its type is "
                f"{call.args[i].ty}"
            )
    return infer_data(call, ctx, "relax.strided_slice")


def _infer_dynamic_slice_backward(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    for i, name in enumerate(("begin", "end", "strides"), start=2):
        tensor_type(call, i, name)
    return infer_data(call, ctx, "relax.dynamic_strided_slice", if_known=True)


_SLICE = [
    ("output_grad", "Tensor", "The gradient with respect to the result of the slice."),
    ("data_shape", "Shape", "The shape of the data."),
]
declare_op(
    "strided_slice_backward_data",
    [
        *_SLICE,
        ("axes", "Tuple", "The sliced axes."),
        ("begin", "Tuple", "The start of the slice."),
        ("end", "Tuple", "The end of the slice."),
        ("strides", "Tuple", "The strides."),
    ],
    _infer_strided_slice_backward,
    strided_slice_backward_data,
    "relax.attrs.StridedSliceAttrs",
)
declare_op(
    "dynamic_strided_slice_backward_data",
    [
        *_SLICE,
        ("begin", "Tensor", "The start of the slice."),
        ("end", "Tensor", "The end of the slice."),
        ("strides", "Tensor", "The strides."),
    ],
    _infer_dynamic_slice_backward,
    dynamic_strided_slice_backward_data,
    requires_argument_shapes=False,
)


@layout_rule("relax.grad.strided_slice_backward_data")
def _layout_strided_slice_backward(
    call: relax.Call, layouts: list, desired: Mapping[str, Sequence[str]]
) -> Converted | None:
    layout, axes = layouts[0], call.args[2]
    shape = moved_shape(call, 1, layout)
    if shape is None or not isinstance(axes, relax.Tuple):
        return None
    places = moved_axes([int(axis) for axis in axes.fields], layout)
    return Converted([layout, *layouts[1:]], layout, args={**shape, 2: convert_to_expr(places)})
