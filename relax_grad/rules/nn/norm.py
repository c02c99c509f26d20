"""Gradients of the normalisations."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax, tirx
from tvm.relax import op
from tvm.relax.op import grad as backward

from ...errors import GradientError
from ...registry import register_gradient
from .._util import cast_like, dtype_of, shape_arg, shape_of, wide_dtype, widen


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
        return _widened(ctx, expr)

    def const(value):
        return relax.const(value, wide)

    def total(expr):
        return emit(op.sum(expr, axes)) if axes else expr

    def per_element(expr):
        return backward.divide_by_count(expr, shape_arg(data), axes) if axes else expr

    def per_channel(expr):
        return op.expand_dims(expr, axes) if axes else expr

    y_grad, new_mean_grad, new_var_grad = (
        widened(emit(relax.TupleGetItem(output_grad, i))) for i in range(3)
    )
    x = widened(data)
    if attrs.training:
        mean = emit(per_element(total(x)))
        centered = emit(op.subtract(x, per_channel(mean)))
        var = emit(per_element(total(op.multiply(centered, centered))))
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
        shift = per_element(mean_grad)
        twist = per_element(op.multiply(const(2.0), var_grad))
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
    return _cast_each(ctx, gradients, orig_call.args)


@register_gradient("relax.nn.layer_norm")
def layer_norm(orig_var, orig_call, output_grad, ctx):
    """Gradient of layer_norm.

    Forward form: ``y = gamma * z + beta`` with ``z = (x - mean(x)) / s`` and ``s = sqrt(mean((x -
    mean(x)) ** 2) + epsilon)``, the means over the axes; ``scale=False`` leaves out gamma and
    ``center=False`` leaves out beta.

    Backward form, with ``g = gamma * y_grad``:

    - ``x_grad = (g - mean(g) - z * mean(g * z)) / s``;
    - ``gamma_grad = sum(y_grad * z)`` and ``beta_grad = sum(y_grad)`` over the other axes.
    """
    attrs = orig_call.attrs
    return _over_parameter_axes(orig_call, output_grad, ctx, attrs.scale, attrs.center)


@register_gradient("relax.nn.rms_norm")
def rms_norm(orig_var, orig_call, output_grad, ctx):
    """Gradient of rms_norm.

    Forward form: ``y = weight * z`` with ``z = x / s`` and ``s = sqrt(mean(x ** 2) + epsilon)``.

    Backward form, with ``g = weight * y_grad``: ``[(g - z * mean(g * z)) / s, sum(y_grad * z)]``, the
    mean over the axes and the sum over the others.
    """
    return _over_parameter_axes(orig_call, output_grad, ctx, scale=True, center=None)


@register_gradient("relax.nn.group_norm")
def group_norm(orig_var, orig_call, output_grad, ctx):
    """Gradient of group_norm.

    Forward form: ``y = gamma * z + beta`` with ``z = (x - m) / s`` and ``s = sqrt(v + epsilon)``, where
    ``m`` and ``v`` are the mean and the variance over the axes and over the channels of a group;
    ``scale=False`` leaves out gamma and ``center=False`` leaves out beta.

    Backward form, with ``N`` elements in a group:

    - ``t = sum(y_grad)`` and ``u = sum(y_grad * z)`` over the axes, for each channel;
    - ``gamma_grad`` and ``beta_grad`` are the sums of ``u`` and of ``t`` over what else there is;
    - ``x_grad = (gamma * y_grad - T / N - z * U / N) / s``, where ``T`` and ``U`` are the sums of ``gamma
      * t`` and ``gamma * u`` over the channels of the group.

    Everything but ``x_grad`` itself comes of the small sums for each channel.
    """
    data, groups = orig_call.args[0], int(orig_call.attrs.num_groups)
    channel = int(orig_call.attrs.channel_axis) % data.ty.ndim
    channels = shape_of(data)[channel]
    if not isinstance(channels, tirx.IntImm):
        raise GradientError(
            f"the number of channels must be a constant, to be divided into groups, but it is {channels}; "
            "write the groups as an axis of their own and use layer_norm"
        )
    return _by_channel(orig_call, output_grad, ctx, channel, int(channels) // groups)


@register_gradient("relax.nn.instance_norm")
def instance_norm(orig_var, orig_call, output_grad, ctx):
    """Gradient of instance_norm.

    Forward and backward form: those of :func:`group_norm` with each channel a group of its own.
    """
    channel = int(orig_call.attrs.channel_axis) % orig_call.args[0].ty.ndim
    return _by_channel(orig_call, output_grad, ctx, channel, 1)


def _over_parameter_axes(
    call: relax.Call,
    output_grad: relax.Expr,
    ctx: relax.BlockBuilder,
    scale: bool,
    center: bool | None,
) -> list[relax.Expr]:
    """Return the partials of a normalization over the axes that gamma and beta have.

    ``center`` is None where there is no beta, and the mean is taken to be 0.
    """
    data, gamma, *beta = call.args
    ndim, emit = data.ty.ndim, ctx.emit
    axes = [int(axis) % ndim for axis in call.attrs.axes]
    others = [axis for axis in range(ndim) if axis not in axes]

    def average(expr):
        return emit(op.mean(expr, axes, keepdims=True)) if axes else expr

    def collect(expr):
        """Sum for each element of gamma; its axes are in the order that the attribute gives."""
        total = emit(op.sum(expr, others)) if others else expr
        order = [sorted(axes).index(axis) for axis in axes]
        return total if order == sorted(order) else op.permute_dims(total, order)

    y_grad, x = _widened(ctx, output_grad), _widened(ctx, data)
    slope = None
    if scale:
        order = sorted(range(len(axes)), key=axes.__getitem__)
        slope = _widened(ctx, gamma)
        slope = slope if order == sorted(order) else emit(op.permute_dims(slope, order))
        slope = emit(op.expand_dims(slope, others)) if others else slope

    def scaled(expr):
        return expr if slope is None else emit(op.multiply(expr, slope))

    centered = x if center is None else emit(op.subtract(x, average(x)))
    inverse = _inverse_deviation(ctx, average(op.multiply(centered, centered)), call)
    z = emit(op.multiply(centered, inverse))
    y_grad_z = emit(op.multiply(y_grad, z))
    g = scaled(y_grad)
    data_grad = g if center is None else op.subtract(g, average(g))
    data_grad = op.subtract(data_grad, op.multiply(z, average(scaled(y_grad_z))))
    gradients = [
        op.multiply(data_grad, inverse),
        collect(y_grad_z) if scale else op.zeros_like(gamma),
    ]
    if beta:
        gradients.append(collect(y_grad) if center else op.zeros_like(*beta))
    return _cast_each(ctx, gradients, call.args)


def _by_channel(
    call: relax.Call,
    output_grad: relax.Expr,
    ctx: relax.BlockBuilder,
    channel: int,
    group_size: int,
) -> list[relax.Expr]:
    """Return the partials of a normalization over axes and groups of channels."""
    data, gamma, beta = call.args
    attrs, ndim, emit = call.attrs, data.ty.ndim, ctx.emit
    axes = [int(axis) % ndim for axis in attrs.axes]
    others = [axis for axis in range(ndim) if axis != channel]

    def total(expr):
        return emit(op.sum(expr, axes, keepdims=True)) if axes else emit(expr)

    def mean(sums):
        """Return the mean of each group, given the sums over the axes for each channel."""
        if group_size > 1:
            sums = _over_groups(ctx, ctx.normalize(sums), channel, group_size)
            sums = op.divide(sums, relax.const(float(group_size), dtype_of(x)))
        return emit(backward.divide_by_count(sums, shape_arg(data), axes) if axes else sums)

    y_grad, x = _widened(ctx, output_grad), _widened(ctx, data)
    centered = emit(op.subtract(x, mean(total(x))))
    inverse = _inverse_deviation(ctx, mean(total(op.multiply(centered, centered))), call)
    t = total(y_grad)
    u = emit(op.multiply(total(op.multiply(y_grad, centered)), inverse))
    slope = relax.const(1.0, dtype_of(x))
    if attrs.scale:
        slope = _widened(ctx, gamma)
        slope = emit(op.expand_dims(slope, others)) if others else slope
    shift = op.multiply(mean(op.multiply(slope, t)), inverse)
    twist = op.multiply(mean(op.multiply(slope, u)), op.multiply(inverse, inverse))
    data_grad = op.subtract(
        op.multiply(y_grad, op.multiply(slope, inverse)),
        op.add(shift, op.multiply(centered, twist)),
    )
    gradients = [
        data_grad,
        op.sum(u, others) if attrs.scale else op.zeros_like(gamma),
        op.sum(t, others) if attrs.center else op.zeros_like(beta),
    ]
    return _cast_each(ctx, gradients, call.args)


def _over_groups(
    ctx: relax.BlockBuilder, expr: relax.Expr, channel: int, group_size: int
) -> relax.Expr:
    """Sum over the channels of each group, and repeat the sum for each of them.

    Without a reshape, whose symbolic extents would end differentiation at order 1.
    """
    channels = int(shape_of(expr)[channel])
    if group_size == channels:
        return op.sum(expr, [channel], keepdims=True)
    firsts = ctx.normalize(op.strided_slice(expr, [channel], [0], [channels], [group_size]))
    sums = backward.repeat_backward_data(expr, shape_arg(firsts), group_size, channel)
    return op.repeat(ctx.emit(sums), group_size, channel)


def _inverse_deviation(
    ctx: relax.BlockBuilder, variance: relax.Expr, call: relax.Call
) -> relax.Expr:
    """Return ``1 / sqrt(variance + epsilon)``."""
    dtype = dtype_of(ctx.normalize(variance))
    sigma = op.sqrt(op.add(variance, relax.const(float(call.attrs.epsilon), dtype)))
    return ctx.emit(op.divide(relax.const(1.0, dtype), sigma))


def _widened(ctx: relax.BlockBuilder, expr: relax.Expr) -> relax.Expr:
    """Bind a tensor in the dtype to accumulate in."""
    wide = widen(expr)
    return expr if wide is expr else ctx.emit(wide)


def _cast_each(
    ctx: relax.BlockBuilder, gradients: Sequence[relax.Expr], arguments: Sequence[relax.Expr]
) -> list[relax.Expr]:
    """Cast each gradient to the dtype of its argument."""
    return [
        cast_like(ctx.normalize(gradient), argument)
        for gradient, argument in zip(gradients, arguments, strict=True)
    ]
