"""Gradients of the backward operators of the normalisations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import relax
from tvm.relax import op
from tvm.relax.op import grad as backward

from ...registry import register_gradient
from .._util import cast_each, const_like, no_grad, shape_arg, widen
from ..nn.norm import average_in_groups, average_over, check_channels, collect, spread


@register_gradient("relax.grad.batch_norm_backward_data")
def batch_norm_backward_data(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of batch_norm_backward_data.

    Forward form, for each channel: ``dx = gamma * r * dy + (M + 2 * V * c) / N`` with
    ``c = x - m``. Here ``m`` and ``r`` are the statistics, and ``M`` and ``V`` are the gradients of
    mean and variance.

    Backward form, with ``h = dx_grad`` and sums over a channel:

    - ``dy_grad = gamma * r * h`` and ``x_grad = 2 * V / N * h``;
    - ``gamma_grad = r * sum(h * dy)`` and ``r_grad = gamma * sum(h * dy)``;
    - ``m_grad = -2 * V / N * sum(h)``, ``M_grad = sum(h) / N`` and ``V_grad = 2 * sum(h * c) / N``.
    """
    ndim = orig_call.args[1].ty.ndim
    axis = int(orig_call.attrs.axis) % ndim
    others = [i for i in range(ndim) if i != axis]
    return _of_affine(orig_call, output_grad, ctx, others, _of_channels(ctx, axis, ndim))


@register_gradient("relax.grad.instance_norm_backward_data")
def instance_norm_backward_data(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of instance_norm_backward_data.

    Forward form and backward form: as :func:`batch_norm_backward_data`, with sums over the
    axes instead of over a channel. The sum for gamma is over all axes except the channels.
    """
    ndim = orig_call.args[1].ty.ndim
    channel = int(orig_call.attrs.channel_axis) % ndim
    axes = _axes(orig_call)
    return _of_affine(orig_call, output_grad, ctx, axes, _of_rows(ctx, axes), channel=channel)


@register_gradient("relax.grad.instance_norm_backward_gamma")
def instance_norm_backward_gamma(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of instance_norm_backward_gamma.

    Forward form and backward form: as :func:`layer_norm_backward_gamma`, with a sum over the
    axes.
    """
    statistics = _of_rows(ctx, _axes(orig_call))
    return _of_sum_of_products(orig_call, output_grad, ctx, statistics, statistics.spread)


@register_gradient("relax.grad.batch_norm_backward_gamma")
def batch_norm_backward_gamma(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of batch_norm_backward_gamma.

    Forward form and backward form: as :func:`layer_norm_backward_gamma`. The sum keeps the
    axis of the channels, which the statistics have too.
    """
    ndim = orig_call.args[1].ty.ndim
    statistics = _of_channels(ctx, int(orig_call.attrs.axis) % ndim, ndim)
    return _of_sum_of_products(orig_call, output_grad, ctx, statistics, statistics.spread)


@register_gradient("relax.grad.layer_norm_backward_data")
def layer_norm_backward_data(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of layer_norm_backward_data.

    Forward form: ``dx = r * (g - average(g) - z * average(g * z))`` with ``g = gamma * dy`` and
    ``z = (x - m)
    * r``.

    Backward form, with ``h = dx_grad * r``:

    - ``q = h - average(h) - z * average(h * z)`` gives ``dy_grad = gamma * q`` and
      ``gamma_grad = sum(dy * q)`` over the other axes;
    - ``p = -(h * average(g * z) + g * average(h * z))`` is the gradient of ``z``, so that
      ``x_grad = r * p``, ``m_grad = -sum(x_grad)`` over the axes, and
      ``r_grad = sum(dx_grad * dx / r + p * (x - m))`` over them.
    """
    dy, x, gamma, mean, rstd = orig_call.args
    gamma = gamma if orig_call.attrs.scale else None
    partials = _of_data_of_rows(
        ctx, orig_call, output_grad, dy, x, gamma=gamma, mean=mean, rstd=rstd
    )
    if gamma is None:
        partials[2] = op.zeros_like(orig_call.args[2])
    return cast_each(ctx, partials, orig_call.args)


@register_gradient("relax.grad.layer_norm_backward_gamma")
def layer_norm_backward_gamma(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of layer_norm_backward_gamma.

    Forward form: ``dgamma = sum(dy * (x - m) * r)`` over all axes except ``axes``.

    Backward form, with ``h = dgamma_grad`` and sums over the axes that the statistics lack:

    - ``dy_grad = h * (x - m) * r`` and ``x_grad = h * dy * r``;
    - ``m_grad = -sum(x_grad)`` and ``r_grad = sum(h * dy * (x - m))``.
    """
    return _of_sum_over_rows(orig_call, output_grad, ctx)


@register_gradient("relax.grad.rms_norm_backward_data")
def rms_norm_backward_data(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of rms_norm_backward_data.

    Forward form: ``dx = r * (g - z * average(g * z))`` with ``g = weight * dy`` and ``z = x * r``.

    Backward form: as :func:`layer_norm_backward_data` without mean and ``average(h)``.
    """
    dy, x, weight, rstd = orig_call.args
    partials = _of_data_of_rows(
        ctx, orig_call, output_grad, dy, x, gamma=weight, mean=None, rstd=rstd
    )
    return cast_each(ctx, partials, orig_call.args)


@register_gradient("relax.grad.rms_norm_backward_weight")
def rms_norm_backward_weight(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of rms_norm_backward_weight.

    Forward form and backward form: as :func:`layer_norm_backward_gamma` without a mean.
    """
    return _of_sum_over_rows(orig_call, output_grad, ctx)


@register_gradient("relax.grad.batch_norm_statistics")
def batch_norm_statistics(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of batch_norm_statistics.

    Forward form: ``m = mean(x)`` and ``r = 1 / sqrt(mean((x - m)**2) + epsilon)`` over the ``N``
    elements of a channel.

    Backward form: ``[(m_grad - r**3 * r_grad * (x - m)) / N]``. The mean of ``x - m`` is 0, so that
    ``r`` does not depend on ``m``.
    """
    ndim = orig_call.args[0].ty.ndim
    axis = int(orig_call.attrs.axis) % ndim
    others = [i for i in range(ndim) if i != axis]
    statistics = _of_channels(ctx, axis, ndim)
    return _of_statistics(orig_var, orig_call, output_grad, ctx, others, statistics=statistics)


@register_gradient("relax.grad.layer_norm_statistics")
def layer_norm_statistics(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of layer_norm_statistics.

    Forward form and backward form: as :func:`batch_norm_statistics`, over ``N`` elements
    along the axes.
    """
    axes = _axes(orig_call, 0)
    return _of_statistics(
        orig_var, orig_call, output_grad, ctx, axes, statistics=_of_rows(ctx, axes)
    )


@register_gradient("relax.grad.instance_norm_statistics")
def instance_norm_statistics(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of instance_norm_statistics.

    Forward form and backward form: as :func:`layer_norm_statistics`.
    """
    return layer_norm_statistics(orig_var, orig_call, output_grad, ctx)


@register_gradient("relax.grad.group_norm_statistics")
def group_norm_statistics(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of group_norm_statistics.

    Forward form: as :func:`layer_norm_statistics`, over the channels of a group too.

    Backward form: as :func:`layer_norm_statistics` with ``m_grad`` and ``r_grad`` averaged
    over each group.
    """
    (data,) = orig_call.args
    channel = int(orig_call.attrs.channel_axis) % data.ty.ndim
    check_channels(data, channel)
    axes, groups = _axes(orig_call, 0), int(orig_call.attrs.num_groups)

    def share(expr: relax.Expr) -> relax.Expr:
        return average_in_groups(ctx, expr, channel, groups)

    return _of_statistics(
        orig_var, orig_call, output_grad, ctx, axes, statistics=_of_rows(ctx, axes), share=share
    )


@register_gradient("relax.grad.rms_norm_statistics")
def rms_norm_statistics(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of rms_norm_statistics.

    Forward form: ``r = 1 / sqrt(mean(x**2) + epsilon)`` over ``N`` elements along the axes.

    Backward form: ``[-r**3 * r_grad * x / N]``.
    """
    (x,) = orig_call.args
    twist = _twist(ctx, orig_var, output_grad)
    x_grad = op.multiply(widen(x), _per_element(ctx, twist, x, _axes(orig_call, 0)))
    return cast_each(ctx, [x_grad], orig_call.args)


@register_gradient("relax.grad.divide_by_count")
def divide_by_count(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of divide_by_count.

    Forward form: ``y = divide_by_count(x, shape, axis)``.

    Backward form: ``[divide_by_count(y_grad, shape, axis), no_grad]``.
    """
    _, of_shape = orig_call.args
    return [
        backward.divide_by_count(output_grad, of_shape, orig_call.attrs.axis),
        no_grad(of_shape),
    ]


@dataclass(frozen=True)
class _Statistics:
    """The mapping between tensors of the statistics' shape and of the data's shape.

    Attributes
    ----------
    spread : Callable
        Makes a tensor of the statistics' shape broadcastable to the data.
    collect : Callable
        Sums a tensor of the data's shape to the statistics' shape.
    """

    spread: Callable[[relax.Expr], relax.Expr]
    collect: Callable[[relax.Expr], relax.Expr]


def _of_channels(ctx: relax.BlockBuilder, axis: int, ndim: int) -> _Statistics:
    """Return the mapping for statistics that are a vector with an element for each channel."""
    return _Statistics(
        lambda expr: spread(ctx, expr, [axis], ndim), lambda expr: collect(ctx, expr, [axis])
    )


def _of_rows(ctx: relax.BlockBuilder, axes: list[int]) -> _Statistics:
    """Return the mapping for statistics with the axes of the data, where normalized axes have
    extent 1."""
    return _Statistics(
        lambda expr: ctx.normalize(widen(expr)),
        lambda expr: ctx.emit(op.sum(expr, axes, keepdims=True) if axes else expr),
    )


def _axes(call: relax.Call, data: int = 1) -> list[int]:
    """Return the normalized axes, all non-negative, given the position of the data among the
    arguments."""
    return [int(axis) % call.args[data].ty.ndim for axis in call.attrs.axes]


def _of_statistics(
    variable: relax.Var,
    call: relax.Call,
    output_grad: relax.Expr,
    ctx: relax.BlockBuilder,
    axes: list[int],
    statistics: _Statistics,
    share: Callable[[relax.Expr], relax.Expr] = lambda expr: expr,
) -> list[relax.Expr]:
    """Return the partial of mean and rstd, where ``share`` averages gradients over elements with
    one statistic."""
    (x,) = call.args
    mean, rstd = (ctx.emit(relax.TupleGetItem(variable, i)) for i in range(2))
    mean_grad, rstd_grad = (ctx.emit(relax.TupleGetItem(output_grad, i)) for i in range(2))
    shift = _per_element(ctx, share(mean_grad), x, axes)
    twist = _per_element(ctx, share(_twist(ctx, rstd, rstd_grad)), x, axes)
    centered = op.subtract(widen(x), statistics.spread(mean))
    x_grad = op.add(statistics.spread(shift), op.multiply(centered, statistics.spread(twist)))
    return cast_each(ctx, [x_grad], call.args)


def _twist(ctx: relax.BlockBuilder, rstd: relax.Expr, rstd_grad: relax.Expr) -> relax.Expr:
    """Return ``-rstd**3 * rstd_grad``, twice the gradient of the variance."""
    cube = op.multiply(op.multiply(rstd, rstd), rstd)
    return ctx.emit(op.negative(op.multiply(cube, rstd_grad)))


def _per_element(
    ctx: relax.BlockBuilder, expr: relax.Expr, data: relax.Expr, axes: list[int]
) -> relax.Expr:
    """Divide by the number of elements of the data along the axes."""
    expr = ctx.emit(expr)
    return ctx.emit(backward.divide_by_count(expr, shape_arg(data), axes)) if axes else expr


def _of_affine(
    call: relax.Call,
    output_grad: relax.Expr,
    ctx: relax.BlockBuilder,
    axes: list[int],
    statistics: _Statistics,
    channel: int | None = None,
) -> list[relax.Expr]:
    """Return the partials of ``gamma * r * dy + (M + 2 * V * (x - m)) / N`` with ``N`` elements
    along axes.

    Gamma has the axis ``channel``, or the shape of the statistics if that is None.
    """
    dy, x, gamma, mean, rstd, _, variance_grad = call.args
    scale = call.attrs.scale
    h, r = ctx.emit(widen(output_grad)), ctx.emit(widen(rstd))

    def per_element(expr: relax.Expr) -> relax.Expr:
        return _per_element(ctx, expr, x, axes)

    factor = None
    if scale:
        if channel is None:
            factor = ctx.emit(widen(gamma))
        else:
            factor = spread(ctx, gamma, [channel], x.ty.ndim)
    slope = ctx.emit(op.multiply(factor, r)) if scale else r
    twist = per_element(op.multiply(const_like(2, r), widen(variance_grad)))
    along, whole = statistics.collect(op.multiply(h, widen(dy))), statistics.collect(h)
    centered = op.subtract(widen(x), statistics.spread(mean))
    gamma_grad = op.zeros_like(gamma)
    if scale:
        gamma_grad = ctx.emit(op.multiply(r, along))
        gamma_grad = gamma_grad if channel is None else collect(ctx, gamma_grad, [channel])
    partials = [
        op.multiply(h, statistics.spread(slope)),
        op.multiply(h, statistics.spread(twist)),
        gamma_grad,
        op.negative(op.multiply(twist, whole)),
        op.multiply(factor, along) if scale else along,
        per_element(whole),
        per_element(op.multiply(const_like(2, r), statistics.collect(op.multiply(h, centered)))),
    ]
    return cast_each(ctx, partials, call.args)


def _of_data_of_rows(
    ctx: relax.BlockBuilder,
    call: relax.Call,
    output_grad: relax.Expr,
    dy: relax.Expr,
    x: relax.Expr,
    gamma: relax.Expr | None,
    mean: relax.Expr | None,
    rstd: relax.Expr,
) -> list[relax.Expr]:
    """Return the partials of the data gradient of a normalization over rows, for the arguments that
    are not None.

    The list has an item for gamma even if gamma is None.
    """
    ndim, axes, emit = x.ty.ndim, _axes(call), ctx.emit

    def average(expr: relax.Expr) -> relax.Expr:
        return average_over(ctx, expr, axes)

    def total(expr: relax.Expr) -> relax.Expr:
        return op.sum(expr, axes, keepdims=True) if axes else expr

    def scaled(expr: relax.Expr) -> relax.Expr:
        return expr if gamma is None else emit(op.multiply(expr, factor))

    factor = None if gamma is None else spread(ctx, gamma, axes, ndim)
    wide_dy, r = emit(widen(dy)), emit(widen(rstd))
    u = emit(widen(output_grad))
    centered = emit(widen(x) if mean is None else op.subtract(widen(x), widen(mean)))
    z = emit(op.multiply(centered, r))
    h, g = emit(op.multiply(u, r)), scaled(wide_dy)
    of_g, of_h = average(op.multiply(g, z)), average(op.multiply(h, z))

    def projected(expr: relax.Expr, twist: relax.Expr) -> relax.Expr:
        expr = expr if mean is None else op.subtract(expr, average(expr))
        return emit(op.subtract(expr, op.multiply(z, twist)))

    q = projected(h, of_h)
    p = emit(op.negative(op.add(op.multiply(h, of_g), op.multiply(g, of_h))))
    x_grad = emit(op.multiply(p, r))
    rstd_grad = op.add(op.multiply(u, projected(g, of_g)), op.multiply(p, centered))
    partials = [scaled(q), x_grad]
    partials.append(None if gamma is None else collect(ctx, op.multiply(wide_dy, q), axes))
    if mean is not None:
        partials.append(op.negative(total(x_grad)))
    return [*partials, total(rstd_grad)]


def _of_sum_over_rows(
    call: relax.Call, output_grad: relax.Expr, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Return the partials of ``sum(dy * (x - m) * r)`` over all axes except the normalized ones."""
    axes = _axes(call)
    return _of_sum_of_products(
        call,
        output_grad,
        ctx,
        _of_rows(ctx, axes),
        lambda expr: spread(ctx, expr, axes, call.args[1].ty.ndim),
    )


def _of_sum_of_products(
    call: relax.Call,
    output_grad: relax.Expr,
    ctx: relax.BlockBuilder,
    statistics: _Statistics,
    spread_result: Callable[[relax.Expr], relax.Expr],
) -> list[relax.Expr]:
    """Return the partials of sums of ``dy * (x - m) * r``, with or without ``m``.

    ``spread_result`` makes a tensor of the shape of the sums broadcastable to the data.
    """
    dy, x, *mean, rstd = call.args
    h, r = spread_result(output_grad), statistics.spread(rstd)
    centered = op.subtract(widen(x), statistics.spread(*mean)) if mean else widen(x)
    centered = ctx.emit(centered)
    h_dy = ctx.emit(op.multiply(h, widen(dy)))
    x_grad = ctx.emit(op.multiply(h_dy, r))
    partials = [op.multiply(op.multiply(h, centered), r), x_grad]
    if mean:
        partials.append(op.negative(statistics.collect(x_grad)))
    partials.append(statistics.collect(op.multiply(h_dy, centered)))
    return cast_each(ctx, partials, call.args)
