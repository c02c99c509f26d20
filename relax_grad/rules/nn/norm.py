"""Gradients of the normalisations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import relax
from tvm.relax import op
from tvm.relax.op import grad as backward

from ...errors import GradientError
from ...op.norm_statistics import deviation
from ...registry import register_gradient
from .._util import cast_each, dtype_of, is_const, shape_arg, shape_of, wide_dtype, widen


@register_gradient("relax.nn.batch_norm")
def batch_norm(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of batch_norm.

    Forward form, for each channel: ``y = gamma * (x - m) / s + beta`` with
    ``s = sqrt(v + epsilon)``; ``scale=False`` leaves out gamma and ``center=False`` leaves out
    beta. In training, ``m`` and ``v`` are the mean and the biased variance of ``x``, and the second
    and third result are ``(1 - momentum)
    * moving_mean + momentum *
      m`` and the same of ``moving_var`` and ``v``. Otherwise ``m`` and ``v``
    are ``moving_mean`` and ``moving_var``, and those are the other two results.

    Backward form, with sums over the ``N`` elements of a channel:

    - ``beta_grad = sum(y_grad)`` and ``gamma_grad = sum(y_grad * (x - m)) / s``;
    - ``y`` contributes ``m_grad = -gamma / s * beta_grad`` and
      ``v_grad = -gamma / s * gamma_grad / (2 * s)`` to the gradients of the statistics, and the
      other two results contribute too;
    - ``x_grad = gamma / s * y_grad``, in training plus ``(m_grad + 2 * v_grad * (x - m)) / N``.

    An operator computes the statistics from ``x``: saving them would change the forward function.
    On CPUs the kernel of the forward pass returns them too. The statistics and the sums are small,
    and all gradients share them. An operator that computed all of one gradient by itself would read
    the large tensors more often. Given them, the gradients of gamma and of the data take one pass
    each. Without training the data gradient is an affine map, which fuses, and so does the sum for
    beta.

    The mask of a ReLU after batch_norm stays a separate call.
    Both kernels on CPUs could apply the mask as they read ``y_grad``, but then each reads a third
    tensor: a step of a U-Net took 1.002 to 1.007 of the time, on one core of a Zen 5.
    """
    data, gamma, beta, moving_mean, moving_var = orig_call.args
    attrs = orig_call.attrs
    ndim = data.ty.ndim
    axes = [axis for axis in range(ndim) if axis != int(attrs.axis) % ndim]
    wide, emit = wide_dtype(data), ctx.emit
    settings = _attrs(orig_call, "axis", "epsilon", "center", "scale", "momentum", "training")

    def const(value: float) -> relax.Expr:
        return relax.const(value, wide)

    def total(expr: relax.Expr) -> relax.Expr:
        return emit(op.sum(expr, axes)) if axes else expr

    def per_channel(expr: relax.Expr) -> relax.Expr:
        return op.expand_dims(expr, axes) if axes else expr

    y_grad, new_mean_grad, new_var_grad = (
        emit(relax.TupleGetItem(output_grad, i)) for i in range(3)
    )
    new_mean_grad, new_var_grad = _widened(ctx, new_mean_grad), _widened(ctx, new_var_grad)
    if attrs.training:
        mean, rstd = _elements(ctx, backward.batch_norm_statistics(data, **settings))
    else:
        mean, var = _widened(ctx, moving_mean), _widened(ctx, moving_var)
        rstd = emit(op.divide(const(1.0), deviation(ctx, var, attrs.epsilon)))
    slope = emit(op.multiply(_widened(ctx, gamma), rstd)) if attrs.scale else rstd

    gamma_grad = emit(backward.batch_norm_backward_gamma(y_grad, data, mean, rstd, **settings))
    beta_grad = total(widen(y_grad))
    mean_grad = op.negative(op.multiply(slope, beta_grad))
    var_grad = op.multiply(op.multiply(slope, const(-0.5)), op.multiply(gamma_grad, rstd))
    if attrs.training:
        momentum, kept = const(float(attrs.momentum)), const(1.0 - float(attrs.momentum))
        mean_grad = emit(op.add(mean_grad, op.multiply(momentum, new_mean_grad)))
        var_grad = emit(op.add(var_grad, op.multiply(momentum, new_var_grad)))
        # The mean of the centered data is 0, so the variance does not depend on the mean.
        data_grad = backward.batch_norm_backward_data(
            y_grad, data, gamma, mean, rstd, mean_grad=mean_grad, variance_grad=var_grad, **settings
        )
        moving_grads = [op.multiply(kept, new_mean_grad), op.multiply(kept, new_var_grad)]
    else:
        data_grad = op.multiply(widen(y_grad), per_channel(slope))
        moving_grads = [op.add(mean_grad, new_mean_grad), op.add(var_grad, new_var_grad)]

    gradients = [
        data_grad,
        gamma_grad if attrs.scale else op.zeros_like(gamma),
        beta_grad if attrs.center else op.zeros_like(beta),
        *moving_grads,
    ]
    return cast_each(ctx, gradients, orig_call.args)


@register_gradient("relax.nn.layer_norm")
def layer_norm(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of layer_norm.

    Forward form: ``y = gamma * z + beta`` with ``z = (x - mean(x)) / s`` and ``s = sqrt(mean((x -
    mean(x)) ** 2) + epsilon)``, with the means over the axes; ``scale=False`` leaves out gamma and
    ``center=False`` leaves out beta.

    Backward form, with ``g = gamma * y_grad``:

    - ``x_grad = (g - mean(g) - z * mean(g * z)) / s``;
    - ``gamma_grad = sum(y_grad * z)`` and ``beta_grad = sum(y_grad)`` over the other axes.

    The sums over a row that ``x_grad`` needs are not results. A dedicated operator computes them
    while the row is in the cache; a composite would read both tensors from memory again. The
    gradient of gamma shares the statistics. The gradient of beta is a plain sum.
    """
    data, gamma, beta = orig_call.args
    attrs = orig_call.attrs
    axes = [int(axis) % data.ty.ndim for axis in attrs.axes]
    settings = _attrs(orig_call, "axes", "epsilon", "center", "scale")
    mean, rstd = _elements(ctx, backward.layer_norm_statistics(data, **settings))
    gamma_grad = op.zeros_like(gamma)
    if attrs.scale:
        gamma_grad = backward.layer_norm_backward_gamma(output_grad, data, mean, rstd, **settings)
    gradients = [
        backward.layer_norm_backward_data(output_grad, data, gamma, mean, rstd, **settings),
        ctx.emit(gamma_grad),
        collect(ctx, widen(output_grad), axes) if attrs.center else op.zeros_like(beta),
    ]
    return cast_each(ctx, gradients, orig_call.args)


@register_gradient("relax.nn.rms_norm")
def rms_norm(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of rms_norm.

    Forward form: ``y = weight * z`` with ``z = x / s`` and ``s = sqrt(mean(x ** 2) + epsilon)``.

    Backward form, with ``g = weight * y_grad``: ``[(g - z * mean(g * z)) / s, sum(y_grad * z)]``,
    with the mean over the axes and the sum over the others. Each is a dedicated operator, for the
    reason given in :func:`layer_norm`.
    """
    data, weight = orig_call.args
    settings = _attrs(orig_call, "axes", "epsilon")
    rstd = ctx.emit(backward.rms_norm_statistics(data, **settings))
    gradients = [
        backward.rms_norm_backward_data(output_grad, data, weight, rstd, **settings),
        backward.rms_norm_backward_weight(output_grad, data, rstd, **settings),
    ]
    return cast_each(ctx, gradients, orig_call.args)


@register_gradient("relax.nn.group_norm")
def group_norm(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of group_norm.

    Forward form: ``y = gamma * z + beta`` with ``z = (x - m) / s`` and ``s = sqrt(v + epsilon)``,
    where ``m`` and ``v`` are the mean and the variance over the axes and over the channels of a
    group; ``scale=False`` leaves out gamma and ``center=False`` leaves out beta.

    Backward form, with ``N`` elements in a group:

    - ``t = sum(y_grad)`` and ``u = sum(y_grad * z)`` over the axes, for each channel;
    - ``gamma_grad`` and ``beta_grad`` are the sums of ``u`` and of ``t`` over all other axes;
    - ``x_grad = (gamma * y_grad - T / N - z * U / N) / s``, where ``T`` and ``U`` are the sums of
      ``gamma
      * t`` and ``gamma * u`` over the channels of the group.

    Everything except ``x_grad`` itself follows from the small sums for each channel. Given the
    gradients of mean and variance, as for :func:`batch_norm`, ``x_grad`` is one pass. The operators
    are those of ``instance_norm``, with the same statistics for all channels of a group.
    """
    data, groups = orig_call.args[0], int(orig_call.attrs.num_groups)
    channel = int(orig_call.attrs.channel_axis) % data.ty.ndim
    check_channels(data, channel)
    return _by_channel(
        orig_call, output_grad, ctx, channel, backward.group_norm_statistics, groups=groups
    )


@register_gradient("relax.nn.instance_norm")
def instance_norm(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of instance_norm.

    Forward and backward form: as :func:`group_norm` where each channel is its own group.
    """
    channel = int(orig_call.attrs.channel_axis) % orig_call.args[0].ty.ndim
    return _by_channel(orig_call, output_grad, ctx, channel, backward.instance_norm_statistics)


def average_over(ctx: relax.BlockBuilder, expr: relax.Expr, axes: Sequence[int]) -> relax.Expr:
    """Return the mean over the axes, which are kept with extent 1; over no axes, the tensor
    itself."""
    return ctx.emit(op.mean(expr, list(axes), keepdims=True) if axes else expr)


def spread(
    ctx: relax.BlockBuilder, parameter: relax.Expr, axes: Sequence[int], ndim: int
) -> relax.Expr:
    """Make a parameter with these axes of a tensor, in the order given, broadcastable to the
    tensor."""
    order = sorted(range(len(axes)), key=axes.__getitem__)
    others = [axis for axis in range(ndim) if axis not in axes]
    expr = widen(parameter)
    expr = expr if order == sorted(order) else op.permute_dims(expr, order)
    return ctx.emit(op.expand_dims(expr, others) if others else expr)


def check_channels(data: relax.Expr, channel: int) -> None:
    """Check that the channels of a tensor can be divided into groups.

    Raises
    ------
    GradientError
        If their number is unknown or symbolic.
    """
    channels = shape_of(data)[channel]
    if not is_const(channels):
        raise GradientError(
            "the number of channels must be a constant to divide it into groups, but it is "
            f"{channels}; write the groups as a separate axis and use layer_norm"
        )


def average_in_groups(
    ctx: relax.BlockBuilder, expr: relax.Expr, channel: int, groups: int | None
) -> relax.Expr:
    """Return the average over the channels of each group, repeated for each channel; if ``groups``
    is None, itself.

    It does not reshape: symbolic extents in a reshape would limit differentiation to order 1.
    """
    expr = ctx.emit(expr)
    if groups is None:
        return expr
    channels = int(shape_of(expr)[channel])
    if channels in (0, groups):
        return expr
    size = channels // groups
    if groups == 1:
        sums = op.sum(expr, [channel], keepdims=True)
    else:
        firsts = ctx.normalize(op.strided_slice(expr, [channel], [0], [channels], [size]))
        sums = backward.repeat_backward_data(expr, shape_arg(firsts), size, channel)
    sums = ctx.emit(op.repeat(ctx.emit(sums), size, channel))
    return ctx.emit(op.divide(sums, relax.const(float(size), dtype_of(expr))))


def collect(ctx: relax.BlockBuilder, expr: relax.Expr, axes: Sequence[int]) -> relax.Expr:
    """Sum over all axes except these, kept in the order given: the transpose of :func:`spread`."""
    expr = ctx.normalize(expr)
    others = [axis for axis in range(expr.ty.ndim) if axis not in axes]
    total = op.sum(expr, others) if others else expr
    order = [sorted(axes).index(axis) for axis in axes]
    return ctx.emit(total if order == sorted(order) else op.permute_dims(total, order))


def _attrs(call: relax.Call, *names: str) -> dict:
    """Return attributes that an operator and its backward operators share."""
    return {name: getattr(call.attrs, name) for name in names}


def _elements(ctx: relax.BlockBuilder, expr: relax.Expr) -> list[relax.Var]:
    """Return the elements of a tuple."""
    both = ctx.emit(expr)
    return [ctx.emit(relax.TupleGetItem(both, i)) for i in range(len(both.ty.fields))]


def _by_channel(
    call: relax.Call,
    output_grad: relax.Expr,
    ctx: relax.BlockBuilder,
    channel: int,
    statistics: Callable[..., relax.Call],
    groups: int | None = None,
) -> list[relax.Expr]:
    """Return the partials of a normalization over axes and groups of channels; if None are given,
    of each channel."""
    data, gamma, beta = call.args
    attrs, ndim, emit = call.attrs, data.ty.ndim, ctx.emit
    axes = [int(axis) % ndim for axis in attrs.axes]
    others = [axis for axis in range(ndim) if axis != channel]

    def total(expr: relax.Expr) -> relax.Expr:
        return emit(op.sum(expr, axes, keepdims=True) if axes else expr)

    def share(sums: relax.Expr) -> relax.Expr:
        return average_in_groups(ctx, sums, channel, groups)

    settings = {
        "channel_axis": channel,
        "axes": axes,
        **_attrs(call, "epsilon", "center", "scale"),
    }
    number = {} if groups is None else {"num_groups": groups}
    average, rstd = _elements(ctx, statistics(data, **number, **settings))
    u = emit(backward.instance_norm_backward_gamma(output_grad, data, average, rstd, **settings))
    t = total(widen(output_grad))
    slope = op.multiply(spread(ctx, gamma, [channel], ndim), rstd) if attrs.scale else rstd
    slope = emit(slope)
    half = relax.const(-0.5, wide_dtype(data))
    mean_grad = share(op.negative(op.multiply(slope, t)))
    var_grad = share(op.multiply(half, op.multiply(op.multiply(slope, u), rstd)))
    gradients = [
        backward.instance_norm_backward_data(
            output_grad,
            data,
            gamma,
            average,
            rstd,
            mean_grad=mean_grad,
            variance_grad=var_grad,
            **settings,
        ),
        op.sum(u, others) if attrs.scale else op.zeros_like(gamma),
        op.sum(t, others) if attrs.center else op.zeros_like(beta),
    ]
    return cast_each(ctx, gradients, call.args)


def _widened(ctx: relax.BlockBuilder, expr: relax.Expr) -> relax.Expr:
    """Cast a tensor to the dtype to accumulate in, and bind the result."""
    wide = widen(expr)
    return expr if wide is expr else ctx.emit(wide)
