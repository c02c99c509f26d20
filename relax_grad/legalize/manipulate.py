"""Legalization of data-movement operators for which TVM's is insufficient, and of their backward
operators.

The operators that join, split and permute elements have separate modules.
"""

from __future__ import annotations

from tvm import relax, topi

from ..registry import register_legalize
from ..topi import manipulate as topi_manipulate
from ._gpu import keep_apart
from ._util import EMPTY, int_list, is_empty, shape_values, stock, zeros

_STOCK_REPEAT = stock("relax.repeat")


@register_legalize("relax.grad.tile_backward_data")
def _tile_backward_data(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    output_grad, data_shape = call.args
    return bb.call_te(
        topi_manipulate.tile_backward_data,
        output_grad,
        shape_values(data_shape),
        int_list(call.attrs.repeats),
        primfunc_name_hint="tile_backward_data",
    )


@register_legalize("relax.grad.repeat_backward_data")
def _repeat_backward_data(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    output_grad, data_shape = call.args
    return bb.call_te(
        topi_manipulate.repeat_backward_data,
        output_grad,
        shape_values(data_shape),
        int(call.attrs.repeats),
        _axis(call),
        primfunc_name_hint="repeat_backward_data",
    )


@register_legalize("relax.repeat", corrects="refuses repeats=0 and a tensor of no dimensions")
def _repeat(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    if int(call.attrs.repeats) > 0 and call.args[0].ty.ndim > 0:
        return _STOCK_REPEAT(bb, call)
    return bb.call_te(
        topi_manipulate.repeat,
        call.args[0],
        list(call.ty.shape.values),
        int(call.attrs.repeats),
        _axis(call),
        primfunc_name_hint="repeat",
    )


@register_legalize(
    "relax.collapse_sum_to",
    corrects="accumulates half precision in half precision and leaves a sum over an empty axis "
    "undefined",
)
def _collapse_sum_to(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return _collapse_sum(bb, call.args[0], shape_values(call.args[1]))


@register_legalize(
    "relax.collapse_sum_like",
    corrects="accumulates half precision in half precision and leaves a sum over an empty axis "
    "undefined",
)
def _collapse_sum_like(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return _collapse_sum(bb, call.args[0], shape_values(call.args[1].ty.shape))


@register_legalize("relax.squeeze", corrects=EMPTY)
def _squeeze(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    if is_empty(call):
        return zeros(bb, call)
    return bb.call_te(topi.squeeze, call.args[0], call.attrs.axis, primfunc_name_hint="squeeze")


@register_legalize("relax.expand_dims", corrects=EMPTY)
def _expand_dims(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    if is_empty(call):
        return zeros(bb, call)
    return bb.call_te(
        topi_manipulate.expand_dims,
        call.args[0],
        int_list(call.attrs.axis),
        primfunc_name_hint="expand_dims",
    )


@register_legalize("relax.permute_dims", corrects=EMPTY)
def _permute_dims(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    if is_empty(call):
        return zeros(bb, call)
    return bb.call_te(topi.transpose, call.args[0], call.attrs.axes, primfunc_name_hint="transpose")


@register_legalize("relax.reshape", corrects="refuses a shape that is computed from a tensor")
def _reshape(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return bb.call_te(
        topi.reshape, call.args[0], shape_values(call.args[1]), primfunc_name_hint="reshape"
    )


def _collapse_sum(bb: relax.BlockBuilder, data: relax.Expr, shape: list) -> relax.Expr:
    total = bb.call_te(topi_manipulate.collapse_sum, data, shape, primfunc_name_hint="collapse_sum")
    return keep_apart(bb, total)


def _axis(call: relax.Call) -> int | None:
    axis = call.attrs.axis
    return None if axis is None else int(axis)
