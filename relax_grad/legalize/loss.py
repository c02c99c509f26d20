"""Legalization of the losses (nll_loss, cross_entropy_with_logits) and of their backward
operators."""

from __future__ import annotations

from tvm import relax

from ..op.loss import check_nll_loss_backward, nll_loss_attrs
from ..registry import register_legalize
from ..topi import loss as topi_loss
from ._gpu import bind_threads
from ._util import stock

_STOCK_CROSS_ENTROPY = stock("relax.nn.cross_entropy_with_logits")


@register_legalize(
    "relax.nn.nll_loss",
    corrects="reads out of bounds at a target that is neither a class nor ignored, and accumulates "
    "half precision in half precision",
)
def _nll_loss(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    predictions, targets, *weights = call.args
    loss = bb.call_te(
        topi_loss.nll_loss,
        predictions,
        targets,
        weights[0] if weights else None,
        **nll_loss_attrs(call),
        primfunc_name_hint="nll_loss",
    )
    return bind_threads(bb, loss)


@register_legalize(
    "relax.grad.nll_loss_backward",
    corrects=(
        "reads weights out of bounds at an ignored target, divides a mean by the sum of the wrong "
        "weights, and returns NaN gradients where all targets are ignored"
    ),
)
def _nll_loss_backward(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    check_nll_loss_backward(call, bb)
    output_grad, predictions, targets, *weights = call.args
    gradient = bb.call_te(
        topi_loss.nll_loss_backward,
        output_grad,
        predictions,
        targets,
        weights[0] if weights else None,
        **nll_loss_attrs(call),
        primfunc_name_hint="nll_loss_backward",
    )
    return bind_threads(bb, gradient)


@register_legalize("relax.grad.nll_loss_backward_weights")
def _nll_loss_backward_weights(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    gradient = bb.call_te(
        topi_loss.nll_loss_backward_weights,
        *call.args,
        **nll_loss_attrs(call),
        primfunc_name_hint="nll_loss_backward_weights",
    )
    return bind_threads(bb, gradient)


@register_legalize(
    "relax.nn.cross_entropy_with_logits",
    corrects=(
        "does not compile for GPUs, where a sum over all axes and its consumer are one function"
    ),
)
def _cross_entropy_with_logits(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return bind_threads(bb, _STOCK_CROSS_ENTROPY(bb, call))


@register_legalize("relax.grad.cross_entropy_with_logits_backward")
def _cross_entropy_with_logits_backward(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    output_grad, factor = call.args
    return bb.call_te(
        topi_loss.cross_entropy_with_logits_backward,
        output_grad,
        factor,
        factor.ty.shape.values[0] if factor.ty.ndim > 1 else None,
        primfunc_name_hint="cross_entropy_with_logits_backward",
    )
