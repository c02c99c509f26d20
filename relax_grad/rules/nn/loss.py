"""Gradients of the losses."""

from __future__ import annotations

from tvm import relax
from tvm.relax.op import grad as backward

from ...errors import GradientError
from ...op.loss import nll_loss_attrs
from ...registry import register_gradient
from .._util import dtype_of, is_static, no_grad


@register_gradient(
    "relax.nn.nll_loss", corrects="gives the weights no gradient, so that it counts as zero"
)
def nll_loss(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of nll_loss.

    Forward form: ``y = nll_loss(x, t, w, reduction, ignore_index)``.

    Backward form: ``[nll_loss_backward(y_grad, x, t, w), no_grad, nll_loss_backward_weights(y_grad,
    x, t, w)]``, without the last one if there are no weights. A target outside ``[0, C)`` other
    than ``ignore_index`` gives NaN; PyTorch raises an error for such a target.
    """
    predictions, targets, *weights = orig_call.args
    attrs = nll_loss_attrs(orig_call)
    partials = [
        backward.nll_loss_backward(output_grad, predictions, targets, *weights, **attrs),
        no_grad(targets),
    ]
    if weights:
        partials.append(
            backward.nll_loss_backward_weights(output_grad, predictions, targets, *weights, **attrs)
        )
    return partials


@register_gradient(
    "relax.nn.cross_entropy_with_logits",
    corrects=(
        "refuses a symbolic batch, and divides half precision by a batch size rounded to half "
        "precision"
    ),
)
def cross_entropy_with_logits(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of cross_entropy_with_logits.

    Forward form: ``z = cross_entropy_with_logits(x, y) = -sum(x * y) / N``, without ``N`` for
    vectors.

    Backward form: ``[-z_grad / N * y, -z_grad / N * x]``. If ``N`` is not a constant, or the dtype
    is neither float32 nor float64, it is ``cross_entropy_with_logits_backward``.
    """
    x, y = orig_call.args
    if x.ty.ndim < 0:
        raise GradientError(f"the rank of {x} must be known")
    if x.ty.ndim > 1:
        if not is_static(x) or dtype_of(x) not in ("float32", "float64"):
            return [
                backward.cross_entropy_with_logits_backward(output_grad, y),
                backward.cross_entropy_with_logits_backward(output_grad, x),
            ]
        output_grad = relax.op.divide(
            output_grad, relax.const(int(x.ty.shape.values[0]), dtype_of(x))
        )
    scale = relax.op.negative(output_grad)
    return [relax.op.multiply(scale, y), relax.op.multiply(scale, x)]
