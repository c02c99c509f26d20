"""Legalization of recurrent layers and their derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import relax
from tvm.relax import op

from ..ir.compat import dtype_of
from ..ir.dtypes import accumulation_dtype
from ..ir.module import short_name
from ..op.recurrent import slopes_of
from ..registry import register_legalize
from ..topi import recurrent as topi_recurrent


@register_legalize("relax.grad.lstm")
def _lstm(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return _call(bb, call, topi_recurrent.lstm, *call.args)


@register_legalize("relax.grad.gru")
def _gru(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    bias = call.args[3] if len(call.args) == 4 else None
    return _call(bb, call, topi_recurrent.gru, *call.args[:3], bias)


@register_legalize("relax.grad.rnn_tanh")
def _rnn_tanh(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return _call(bb, call, topi_recurrent.rnn, *call.args, "tanh")


@register_legalize("relax.grad.rnn_relu")
def _rnn_relu(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return _call(bb, call, topi_recurrent.rnn, *call.args, "relu")


@register_legalize("relax.grad.recurrent_backward")
def _recurrent_backward(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    output_grad, slopes, weight, *cells_grad = call.args
    return _call(
        bb,
        call,
        topi_recurrent.recurrent_backward,
        output_grad,
        slopes,
        weight,
        cells_grad[0] if cells_grad else None,
        slopes_of(slopes, weight),
    )


@register_legalize("relax.grad.recurrent_tangent")
def _recurrent_tangent(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    *inputs, slopes, weight = call.args[:5]
    cell = call.args[5] if len(call.args) == 6 else None
    return _call(
        bb,
        call,
        topi_recurrent.recurrent_tangent,
        *inputs,
        slopes,
        weight,
        cell,
        slopes_of(slopes, weight),
    )


@register_legalize("relax.grad.previous_steps")
def _previous_steps(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return bb.call_te(
        topi_recurrent.previous_steps, *call.args, primfunc_name_hint="previous_steps"
    )


@register_legalize("relax.grad.next_steps")
def _next_steps(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return bb.call_te(topi_recurrent.next_steps, *call.args, primfunc_name_hint="next_steps")


def _call(bb: relax.BlockBuilder, call: relax.Call, function: Callable, *args: Any) -> relax.Expr:
    """Return the results of a function of tensors; half precision is computed by the operator in
    float32."""
    dtype = dtype_of(call.args[0].ty)
    wide = accumulation_dtype(dtype)
    if wide == dtype:
        return bb.call_te(function, *args, primfunc_name_hint=short_name(call))
    computed = bb.emit(
        relax.Call(call.op, [bb.emit(op.astype(argument, wide)) for argument in call.args])
    )
    if isinstance(computed.ty, relax.TensorType):
        return op.astype(computed, dtype)
    results = (relax.TupleGetItem(computed, i) for i in range(len(computed.ty.fields)))
    return relax.Tuple([bb.emit(op.astype(bb.emit(result), dtype)) for result in results])
