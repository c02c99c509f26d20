"""Gradients of the normalisations."""

from __future__ import annotations

import math

from tvm import relax, tirx
from tvm.relax import op

from ...registry import register_gradient
from .._util import cast_like, dtype_of, shape_of, wide_dtype, widen


@register_gradient("relax.nn.batch_norm")
def batch_norm(orig_var, orig_call, output_grad, ctx):
    """Gradient of batch_norm.

    Forward form, for each channel: ``y = gamma * (x - m) / s + beta`` with ``s = sqrt(v + epsilon)``;
    ``scale=False`` leaves out gamma and ``center=False`` leaves out beta. In training, ``m`` and ``v``
    are the mean and the biased variance of ``x``, and the second and third result are ``(1 - momentum)
    * moving_mean + momentum * m`` and the same of ``moving_var`` and ``v``. Otherwise ``m`` and ``v``
    are ``moving_mean`` and ``moving_var``, and those are the other two results.

    Backward form, with sums over the ``N`` elements of a channel:

    - ``beta_grad = sum(y_grad)`` and ``gamma_grad = sum(y_grad * (x - m)) / s``;
    - the statistics have ``m_grad = -gamma / s * beta_grad`` and ``v_grad = -gamma / s * gamma_grad /
      (2 * s)`` from ``y``, and what the other two results contribute;
    - ``x_grad = gamma / s * y_grad``, in training plus ``(m_grad + 2 * v_grad * (x - m)) / N``.

    The statistics are computed again from ``x``: saving them would change the forward function.
    """
    data, gamma, beta, moving_mean, moving_var = orig_call.args
    attrs = orig_call.attrs
    ndim = data.ty.ndim
    axes = [axis for axis in range(ndim) if axis != int(attrs.axis) % ndim]
    wide, emit = wide_dtype(data), ctx.emit

    def widened(expr):
        wider = widen(expr)
        return expr if wider is expr else emit(wider)

    def const(value):
        return relax.const(value, wide)

    def total(expr):
        return emit(op.sum(expr, axes)) if axes else expr

    def per_channel(expr):
        return op.expand_dims(expr, axes) if axes else expr

    y_grad, new_mean_grad, new_var_grad = (
        widened(emit(relax.TupleGetItem(output_grad, i))) for i in range(3)
    )
    x = widened(data)
    if attrs.training:
        count = _count(ctx, x, axes)
        mean = emit(op.divide(total(x), count))
        centered = emit(op.subtract(x, per_channel(mean)))
        var = emit(op.divide(total(op.multiply(centered, centered)), count))
    else:
        mean, var = widened(moving_mean), widened(moving_var)
        centered = emit(op.subtract(x, per_channel(mean)))
    sigma = emit(op.sqrt(op.add(var, const(float(attrs.epsilon)))))
    slope = emit(op.divide(widened(gamma) if attrs.scale else const(1.0), sigma))

    beta_grad = total(y_grad)
    gamma_grad = emit(op.divide(total(op.multiply(y_grad, centered)), sigma))
    mean_grad = op.negative(op.multiply(slope, beta_grad))
    var_grad = op.multiply(op.multiply(slope, const(-0.5)), op.divide(gamma_grad, sigma))
    data_grad = op.multiply(y_grad, per_channel(slope))
    if attrs.training:
        momentum, kept = const(float(attrs.momentum)), const(1.0 - float(attrs.momentum))
        mean_grad = op.add(mean_grad, op.multiply(momentum, new_mean_grad))
        var_grad = op.add(var_grad, op.multiply(momentum, new_var_grad))
        # The mean of the centered data is 0, so the variance does not change with the mean.
        shift = op.divide(mean_grad, count)
        twist = op.divide(op.multiply(const(2.0), var_grad), count)
        data_grad = op.add(
            op.add(data_grad, per_channel(shift)), op.multiply(centered, per_channel(twist))
        )
        moving_grads = [op.multiply(kept, new_mean_grad), op.multiply(kept, new_var_grad)]
    else:
        moving_grads = [op.add(mean_grad, new_mean_grad), op.add(var_grad, new_var_grad)]

    gradients = [
        data_grad,
        gamma_grad if attrs.scale else op.zeros_like(gamma),
        beta_grad if attrs.center else op.zeros_like(beta),
        *moving_grads,
    ]
    return [
        cast_like(ctx.normalize(gradient), argument)
        for gradient, argument in zip(gradients, orig_call.args, strict=True)
    ]


def _count(ctx: relax.BlockBuilder, tensor: relax.Expr, axes: list[int]) -> relax.Expr:
    """Return the number of elements along the axes, as a scalar of the tensor's dtype.

    Symbolic extents are counted, one axis after the other: every partial sum of such a count is a
    multiple of the count before, and so stays exact in float32 for longer than one long sum.
    """
    extents = [shape_of(tensor)[axis] for axis in axes]
    if all(isinstance(extent, tirx.IntImm) for extent in extents):
        return relax.const(float(math.prod(map(int, extents))), dtype_of(tensor))
    counts = op.ones_like(tensor)
    for axis in sorted(axes, reverse=True):
        counts = op.sum(counts, [axis])
    return ctx.emit(counts)
