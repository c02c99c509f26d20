"""Legalization of activations for which TVM's is wrong, and of their backward operators."""

from __future__ import annotations

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
    output_grad, output = call.args
    gradient = bb.call_te(
        topi_activation.softmax_backward,
        output_grad,
        output,
        int(call.attrs.axis) % output_grad.ty.ndim,
        primfunc_name_hint="softmax_backward",
    )
    # TVM's rules for GPUs are wrong for an axis of a single element.
    return bind_threads(bb, gradient, always=False)
