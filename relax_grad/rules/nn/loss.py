"""Gradients of the losses, and of the softmax in front of them."""

from __future__ import annotations

from tvm import relax
from tvm.relax.op import grad as backward

from ...errors import GradientError
from ...op.loss import nll_loss_attrs
from ...registry import register_gradient
from .._util import cast_like, dtype_of, is_static, no_grad, wide_dtype, widen


@register_gradient(
    "relax.nn.nll_loss", corrects="gives the weights no gradient, which counts as zero"
)
def nll_loss(orig_var, orig_call, output_grad, ctx):
    """Gradient of nll_loss.

    Forward form: ``y = nll_loss(x, t, w, reduction, ignore_index)``.

    Backward form: ``[nll_loss_backward(y_grad, x, t, w), no_grad, nll_loss_backward_weights(y_grad, x,
    t, w)]``, without the last where there are no weights. A target outside ``[0, C)`` that is not
    ``ignore_index``, which PyTorch refuses, gives NaN.
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
    corrects="refuses a symbolic batch, and divides half precision by a batch size rounded to it",
)
def cross_entropy_with_logits(orig_var, orig_call, output_grad, ctx):
    """Gradient of cross_entropy_with_logits.

    Forward form: ``z = cross_entropy_with_logits(x, y) = -sum(x * y) / N``, without ``N`` for vectors.

    Backward form: ``[-z_grad / N * y, -z_grad / N * x]``; an operator of its own for what has no
    constant ``N`` of the dtype at hand.
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


@register_gradient("relax.nn.log_softmax", corrects="accumulates half precision in half precision")
def log_softmax(orig_var, orig_call, output_grad, ctx):
    """Gradient of log_softmax.

    Forward form: ``y = log_softmax(x, axis)``.

    Backward form: ``[y_grad - sum(y_grad, axis, keepdims=True) * exp(y)]``. It stays in TVM's form, which
    TVM's tests fix: an operator of its own would spare one pass over ``y_grad``.
    """
    (x,) = orig_call.args
    y, grad = _wide_result(orig_var, orig_call, ctx), ctx.normalize(widen(output_grad))
    total = relax.op.sum(grad, orig_call.attrs.axis, keepdims=True)
    partial = relax.op.subtract(grad, relax.op.multiply(total, relax.op.exp(y)))
    return [cast_like(ctx, partial, x)]


@register_gradient(
    "relax.nn.softmax",
    corrects="accumulates half precision in half precision, and reads its tensors from memory twice",
)
def softmax(orig_var, orig_call, output_grad, ctx):
    """Gradient of softmax.

    Forward form: ``y = softmax(x, axis)``.

    Backward form: ``[softmax_backward(y_grad, y, axis)]``, which is ``(y_grad - sum(y_grad * y, axis,
    keepdims=True)) * y``. The sum is no result of its own, so an operator takes it while the row is in the
    cache, where a composite reads both tensors from memory again.
    """
    y = _wide_result(orig_var, orig_call, ctx)
    return [backward.softmax_backward(output_grad, y, int(orig_call.attrs.axis))]


def _wide_result(orig_var: relax.Var, orig_call: relax.Call, ctx: relax.BlockBuilder) -> relax.Expr:
    """Return the result of a softmax, computed again in float32 where it has half precision.

    TVM sums the exponentials in half precision, where the sum of a long axis stops growing.
    """
    (x,) = orig_call.args
    if wide_dtype(x) == dtype_of(x):
        return orig_var
    return ctx.normalize(relax.Call(orig_call.op, [ctx.normalize(widen(x))], orig_call.attrs))
