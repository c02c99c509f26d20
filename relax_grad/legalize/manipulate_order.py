"""Legalization of the operators that permute elements, and of their gradients."""

from __future__ import annotations

from tvm import relax

from ..registry import register_legalize
from ..topi import manipulate_order as topi_order
from ..topi.util import is_static
from ._util import EMPTY, is_empty, shape_values, stock, zeros

_STOCK_LAYOUT_TRANSFORM = stock("relax.layout_transform")
_STOCK_REVERSE_SEQUENCE = stock("relax.reverse_sequence")


@register_legalize("relax.reverse_sequence", corrects="refuses a symbolic batch extent")
def _reverse_sequence(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    data, seq_lengths = call.args
    seq_axis, batch_axis = int(call.attrs.seq_axis), int(call.attrs.batch_axis)
    batches = [shape_values(data.ty.shape)[batch_axis], *shape_values(seq_lengths.ty.shape)]
    if all(map(is_static, batches)):
        return _STOCK_REVERSE_SEQUENCE(bb, call)
    return bb.call_te(
        topi_order.reverse_sequence,
        data,
        seq_lengths,
        seq_axis,
        batch_axis,
        primfunc_name_hint="reverse_sequence",
    )


@register_legalize("relax.layout_transform", corrects=EMPTY)
def _layout_transform(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return zeros(bb, call) if is_empty(call) else _STOCK_LAYOUT_TRANSFORM(bb, call)


@register_legalize("relax.grad.layout_transform_backward_x")
def _layout_transform_backward_x(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    if is_empty(call):
        return zeros(bb, call)
    output_grad, x_shape = call.args
    index_map = call.attrs.index_map  # call_te does not accept it as an argument
    return bb.call_te(
        lambda grad, shape: topi_order.layout_transform_backward_x(grad, shape, index_map),
        output_grad,
        shape_values(x_shape),
        primfunc_name_hint="layout_transform_backward_x",
    )


@register_legalize("relax.nn.pixel_shuffle", corrects="calls a function that does not exist in TVM")
def _pixel_shuffle(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    if is_empty(call):
        return zeros(bb, call)
    return bb.call_te(
        topi_order.pixel_shuffle,
        call.args[0],
        int(call.attrs.upscale_factor),
        primfunc_name_hint="pixel_shuffle",
    )


@register_legalize("relax.grad.pixel_shuffle_backward_data")
def _pixel_shuffle_backward_data(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    if is_empty(call):
        return zeros(bb, call)
    output_grad, data_shape = call.args
    return bb.call_te(
        topi_order.pixel_shuffle_backward_data,
        output_grad,
        shape_values(data_shape),
        int(call.attrs.upscale_factor),
        primfunc_name_hint="pixel_shuffle_backward_data",
    )
