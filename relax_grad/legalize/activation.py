"""Legalization of activations for which TVM's is wrong, and of their backward operators."""

from __future__ import annotations

from collections.abc import Callable

from tvm import relax, tirx

from ..registry import register_legalize
from ..topi import activation as topi_activation
from ._gpu import bind_threads
from ._util import stock

_STOCK_PRELU = stock("relax.nn.prelu")


@register_legalize("relax.nn.prelu", corrects="refuses a symbolic extent along the axis")
def _prelu(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    data, alpha = call.args
    axis = int(call.attrs.axis)
    shape = data.ty.shape
    if not isinstance(shape, relax.ShapeExpr) or isinstance(shape.values[axis], tirx.IntImm):
        return _STOCK_PRELU(bb, call)
    return bb.call_te(topi_activation.prelu, data, alpha, axis, primfunc_name_hint="prelu")


@register_legalize("relax.grad.softmax_backward")
def _softmax_backward(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return _of_rows(bb, call, topi_activation.softmax_backward)


@register_legalize("relax.grad.log_softmax_backward")
def _log_softmax_backward(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return _of_rows(bb, call, topi_activation.log_softmax_backward)


def _of_rows(bb: relax.BlockBuilder, call: relax.Call, expression: Callable) -> relax.Expr:
    axis = int(call.attrs.axis) % call.args[0].ty.ndim
    gradient = bb.call_te(expression, *call.args, axis, primfunc_name_hint=expression.__name__)
    # TVM's rules for GPUs are wrong for an axis of a single element.
    return bind_threads(bb, gradient, always=False)
