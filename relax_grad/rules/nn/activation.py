"""Gradients of the activations."""

from __future__ import annotations

import math

from tvm import relax
from tvm.relax.op import grad as backward

from ...errors import GradientError
from ...registry import register_gradient
from .._util import cast_like, const_like, dtype_of, is_one, shape_of, wide_dtype, widen, zero

_SELU_SCALE = 1.0507009873554804934193349852946
_SELU_ALPHA = 1.6732632423543772848170429916717


@register_gradient("relax.nn.relu", corrects="is 1 at 0, where PyTorch's and JAX's are 0")
def relu(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of relu.

    Forward form: ``y = relu(x)``.

    Backward form: ``[where(x <= 0, 0, y_grad)]``; as in PyTorch, it is 0 at 0, and ``y_grad`` where
    ``x`` is NaN.
    """
    (x,) = orig_call.args
    closed = relax.op.less_equal(x, zero(x))
    return [relax.op.where(closed, zero(x), output_grad)]


@register_gradient("relax.nn.leakyrelu")
def leakyrelu(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of leakyrelu.

    Forward form: ``y = leakyrelu(x, alpha)``.

    Backward form: ``[where(x > 0, y_grad, alpha * y_grad)]``.
    """
    (x,) = orig_call.args
    slope = const_like(orig_call.attrs.alpha, x)
    return [relax.op.where(relax.op.greater(x, zero(x)), output_grad, slope * output_grad)]


@register_gradient("relax.nn.prelu")
def prelu(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of prelu.

    Forward form: ``y = prelu(x, alpha, axis)`` with an ``alpha`` for each position along the axis,
    or one for all.

    Backward form: ``[where(x > 0, y_grad, alpha * y_grad), sum(where(x > 0, 0, x *
    y_grad))]``. The sum is over all axes except ``axis``, or over all axes. Half precision is
    summed in float32.

    Raises
    ------
    GradientError
        If ``alpha`` does not have one dimension.
    """
    x, alpha = orig_call.args
    extents = shape_of(alpha)
    if len(extents) != 1:
        raise GradientError(
            f"alpha must have one dimension, but its type is {alpha.ty}; reshape it"
        )
    ndim = len(shape_of(x))
    axis = int(orig_call.attrs.axis) % ndim
    others = [i for i in range(ndim) if i != axis]
    open_ = relax.op.greater(x, zero(x))
    slope = relax.op.expand_dims(alpha, others) if others else alpha
    x_grad = relax.op.where(open_, output_grad, slope * output_grad)

    wide, grad = ctx.normalize(widen(x)), ctx.normalize(widen(output_grad))
    products = relax.op.where(open_, zero(wide), wide * grad)
    if is_one(extents[0]):
        alpha_grad = relax.op.expand_dims(relax.op.sum(products), 0)
    else:
        alpha_grad = relax.op.sum(products, others)
    return [x_grad, cast_like(ctx, alpha_grad, alpha)]


@register_gradient("relax.nn.gelu")
def gelu(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of gelu.

    Forward form: ``y = x * P(x)`` with the normal distribution
    ``P(x) = (1 + erf(x / sqrt(2))) / 2``.

    Backward form: ``[y_grad * (P(x) + x * exp(-x**2 / 2) / sqrt(2 * pi))]``, in float32 at least.
    """
    x, grad = _wide_arguments(orig_call, output_grad, ctx)
    half = const_like(0.5, x)
    below = half + half * relax.op.erf(x * const_like(math.sqrt(0.5), x))
    density = relax.op.exp(const_like(-0.5, x) * x * x) * const_like(1 / math.sqrt(2 * math.pi), x)
    return _cast_partial(grad * (below + x * density), orig_call, ctx)


@register_gradient("relax.nn.gelu_tanh")
def gelu_tanh(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of gelu_tanh.

    Forward form: ``y = x / 2 * (1 + t)`` with ``t = tanh(k * (x + c * x**3))``,
    ``k = sqrt(2 / pi)`` and ``c = 0.044715``.

    Backward form: ``[y_grad * ((1 + t) / 2 + k / 2 * (s + 3 * c * s * x * x))]`` with
    ``s = x * (1 - t**2)``, in float32 at least. ``s`` is 0 before ``x**2`` overflows.
    """
    x, grad = _wide_arguments(orig_call, output_grad, ctx)
    scale, cubic = math.sqrt(2 / math.pi), 0.044715
    one, half = const_like(1, x), const_like(0.5, x)
    inner = const_like(scale, x) * x * (one + const_like(cubic, x) * x * x)
    tanh = relax.op.tanh(inner)
    slope = x * ((one - tanh) * (one + tanh))
    rise = const_like(scale / 2, x) * (slope + const_like(3 * cubic, x) * (slope * x * x))
    return _cast_partial(grad * (half + half * tanh + rise), orig_call, ctx)


@register_gradient("relax.nn.selu")
def selu(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of selu.

    Forward form: ``y = scale * (max(x, 0) + alpha * (exp(min(x, 0)) - 1))``.

    Backward form: ``[y_grad * where(x <= 0, scale * alpha * exp(x), scale)]``, in float32 at least.
    A positive ``x`` is kept out of the exponential, which could overflow.
    """
    x, grad = _wide_arguments(orig_call, output_grad, ctx)
    falling = relax.op.less_equal(x, zero(x))
    exp = relax.op.exp(relax.op.where(falling, x, zero(x)))
    slope = const_like(_SELU_SCALE * _SELU_ALPHA, x) * exp
    return _cast_partial(
        grad * relax.op.where(falling, slope, const_like(_SELU_SCALE, x)), orig_call, ctx
    )


@register_gradient("relax.nn.softplus")
def softplus(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of softplus.

    Forward form: ``y = where(beta * x > threshold, x, log(1 + exp(beta * x)) / beta)``.

    Backward form: ``[where(beta * x > threshold, y_grad, y_grad * sigmoid(beta * x))]``, in float32
    at least.
    """
    x, grad = _wide_arguments(orig_call, output_grad, ctx)
    scaled = const_like(orig_call.attrs.beta, x) * x
    linear = relax.op.greater(scaled, const_like(orig_call.attrs.threshold, x))
    return _cast_partial(
        relax.op.where(linear, grad, grad * relax.op.sigmoid(scaled)), orig_call, ctx
    )


def _wide_arguments(
    orig_call: relax.Call, output_grad: relax.Expr, ctx: relax.BlockBuilder
) -> tuple[relax.Expr, relax.Expr]:
    """Return the argument and the output gradient in float32 at least."""
    return ctx.normalize(widen(orig_call.args[0])), ctx.normalize(widen(output_grad))


def _cast_partial(
    partial: relax.Expr, orig_call: relax.Call, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    return [cast_like(ctx, partial, orig_call.args[0])]


@register_gradient(
    "relax.nn.log_softmax",
    corrects="accumulates half precision in half precision, and reads its tensors from memory "
    "twice",
)
def log_softmax(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of log_softmax.

    Forward form: ``y = log_softmax(x, axis)``.

    Backward form: ``[log_softmax_backward(y_grad, y, axis)]``, which is
    ``y_grad - sum(y_grad, axis, keepdims=True) * exp(y)``, for the reason given in :func:`softmax`.
    """
    y = _wide_result(orig_var, orig_call, ctx)
    return [backward.log_softmax_backward(output_grad, y, int(orig_call.attrs.axis))]


@register_gradient(
    "relax.nn.softmax",
    corrects="accumulates half precision in half precision, and reads its tensors from memory "
    "twice",
)
def softmax(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of softmax.

    Forward form: ``y = softmax(x, axis)``.

    Backward form: ``[softmax_backward(y_grad, y, axis)]``, which is
    ``(y_grad - sum(y_grad * y, axis, keepdims=True)) * y``. The operator computes the sum of a row
    while the row is in the cache. A composite of smaller operators would read both tensors from
    memory again.
    """
    y = _wide_result(orig_var, orig_call, ctx)
    return [backward.softmax_backward(output_grad, y, int(orig_call.attrs.axis))]


def _wide_result(orig_var: relax.Var, orig_call: relax.Call, ctx: relax.BlockBuilder) -> relax.Expr:
    """Return the result of a softmax, recomputed in float32 if it has half precision.

    TVM sums the exponentials in half precision, where the sum over a long axis stops growing.
    """
    (x,) = orig_call.args
    if wide_dtype(x) == dtype_of(x):
        return orig_var
    return ctx.normalize(relax.Call(orig_call.op, [ctx.normalize(widen(x))], orig_call.attrs))
