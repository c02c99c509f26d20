"""Gradients of the backward operators of the losses."""

from __future__ import annotations

from tvm import relax
from tvm.relax.op import grad as backward
from tvm.relax.op.nn import cross_entropy_with_logits, nll_loss

from ...op.loss import nll_loss_attrs
from ...registry import register_gradient
from .._util import cast_like, no_grad, widen


@register_gradient("relax.grad.nll_loss_backward")
def nll_loss_backward(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of nll_loss_backward.

    Forward form: ``dx = nll_loss_backward(dy, x, t, w)``, which does not depend on the values of
    ``x``.

    Backward form: ``[nll_loss(dx_grad, t, w), no_grad, no_grad, nll_loss_backward_weights(dy,
    dx_grad, t, w)]``, without the last one if there are no weights. As in PyTorch, the first is NaN
    for a mean over only ignored targets.
    """
    dy, predictions, targets, *weights = orig_call.args
    attrs = nll_loss_attrs(orig_call)
    partials = [
        nll_loss(output_grad, targets, *weights, **attrs),
        no_grad(predictions),
        no_grad(targets),
    ]
    if weights:
        partials.append(
            backward.nll_loss_backward_weights(dy, output_grad, targets, *weights, **attrs)
        )
    return partials


@register_gradient("relax.grad.nll_loss_backward_weights")
def nll_loss_backward_weights(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of nll_loss_backward_weights.

    Forward form: ``dw = nll_loss_backward_weights(dy, x, t, w)``.

    Backward form: with ``h = dw_grad``, for the reductions ``none`` and ``sum``, where ``dw`` does
    not depend on ``w``, ``[nll_loss(x, t, h), nll_loss_backward(dy, x, t, h), no_grad, no_grad]``.

    For ``mean``, ``dw[c]`` is the sum over the targets ``c`` of ``-(x + L) * dy / W`` with the loss
    ``L`` and the sum ``W`` of the targets' weights. With ``V = nll_loss_backward_weights``,
    ``D = <h, V(1, x, t, w)>``, which is the loss's derivative along ``h``, and ``H`` the sum of
    ``h`` over the targets,

    - the gradient of ``dy`` is ``D``;
    - of ``x``, ``nll_loss_backward(dy / W, x, t, h, "sum")`` and, through ``L``,
      ``nll_loss_backward(-H * dy / W, x, t, w)``;
    - of ``w``, through ``L``, ``V(-H * dy / W, x, t, w)`` and, through ``W``, ``-D * dy / W`` for
      each target of the class.

    Half precision is computed in float32, which can hold the sums.
    """
    dy, predictions, targets, weights = orig_call.args
    attrs = nll_loss_attrs(orig_call)
    if attrs["reduction"] != "mean":
        return [
            nll_loss(predictions, targets, output_grad, **attrs),
            backward.nll_loss_backward(dy, predictions, targets, output_grad, **attrs),
            no_grad(targets),
            no_grad(weights),
        ]

    scalar, x, w, h = (
        ctx.normalize(widen(tensor)) for tensor in (dy, predictions, weights, output_grad)
    )
    summed = {**attrs, "reduction": "sum"}
    ones = ctx.normalize(relax.op.ones_like(x))

    def sum_over_targets(class_values: relax.Expr) -> relax.Expr:
        return relax.op.negative(nll_loss(ones, targets, class_values, **summed))

    slope = relax.op.sum(
        relax.op.multiply(
            h,
            backward.nll_loss_backward_weights(relax.op.ones_like(scalar), x, targets, w, **attrs),
        )
    )
    scale = relax.op.divide(scalar, sum_over_targets(w))
    through_loss = relax.op.negative(relax.op.multiply(scale, sum_over_targets(h)))
    partials = [
        slope,
        relax.op.add(
            backward.nll_loss_backward(scale, x, targets, h, **summed),
            backward.nll_loss_backward(through_loss, x, targets, w, **attrs),
        ),
        None,
        relax.op.add(
            backward.nll_loss_backward_weights(through_loss, x, targets, w, **attrs),
            backward.nll_loss_backward_weights(
                relax.op.multiply(slope, scale), ones, targets, w, **summed
            ),
        ),
    ]
    return [
        no_grad(argument) if partial is None else cast_like(ctx, partial, argument)
        for partial, argument in zip(partials, orig_call.args, strict=True)
    ]


@register_gradient("relax.grad.cross_entropy_with_logits_backward")
def cross_entropy_with_logits_backward(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of cross_entropy_with_logits_backward.

    Forward form: ``dx = cross_entropy_with_logits_backward(dz, y) = -dz * y / N``.

    Backward form: ``[cross_entropy_with_logits(dx_grad, y), cross_entropy_with_logits_backward(dz,
    dx_grad)]``.
    """
    dz, factor = orig_call.args
    return [
        cross_entropy_with_logits(output_grad, factor),
        backward.cross_entropy_with_logits_backward(dz, output_grad),
    ]
