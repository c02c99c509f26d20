"""What kernels of normalisations save for gradients: the statistics, and the gradient of beta with that of gamma."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from tvm import relax
from tvm_ffi import structural_equal

from ...ir.compat import constant_value
from . import norm
from .registry import CallSite, Kernel
from .residuals import BlockCalls, Found, ResidualKernel, residuals_for

#: The gradients that are given the statistics, and where among their arguments these are.
_GIVEN = {
    "batch_norm": {"data": slice(3, 5), "gamma": slice(2, 4)},
    "layer_norm": {"data": slice(3, 5), "gamma": slice(2, 4)},
    "rms_norm": {"data": slice(3, 4), "weight": slice(2, 3)},
}


@residuals_for("relax.nn.batch_norm", "relax.nn.layer_norm", "relax.nn.rms_norm")
def with_statistics(site: CallSite, var: relax.Var, calls: BlockCalls) -> ResidualKernel | None:
    """Return a normalization with its statistics, where a gradient is given them computed again."""
    name = site.call.op.name.rpartition(".")[2]
    forward = calls.original(var)
    if forward is None:
        return None
    data = forward.args[0]
    axes = _normalized_axes(forward.attrs, name, data.ty.ndim)
    wanted = data, axes, _rounded(forward.attrs.epsilon)
    for argument in _GIVEN[name]:
        gradient = f"relax.grad.{name}_backward_{argument}"
        statistics = calls.take(var, gradient, _STATISTICS[name, argument], wanted)
        if statistics is not None:
            break
    else:
        return None
    shape = site.shape(statistics[0])
    kernel = getattr(norm, name)(site, shape) if shape else None
    uses = {each: _saved(i) for i, each in enumerate(statistics)}
    return kernel and ResidualKernel(kernel, [each.ty for each in statistics], uses)


@residuals_for(
    "relax.grad.batch_norm_backward_gamma",
    "relax.grad.instance_norm_backward_gamma",
    "relax.grad.layer_norm_backward_gamma",
)
def with_beta(site: CallSite, var: relax.Var, calls: BlockCalls) -> ResidualKernel | None:
    """Return the gradient of gamma with that of beta, which is the sum of the same output gradient."""
    name = site.call.op.name.rpartition(".")[2]
    backward = calls.original(var)
    if backward is None:
        return None
    output_grad = backward.args[0]
    wanted = output_grad, _summed_axes(backward.attrs, name, output_grad.ty.ndim)
    found = calls.take(var, "relax.sum", _sum, wanted)
    if found is None:
        return None
    (later,) = found
    shape, make = site.shape(later), _GAMMA[name.partition("_norm")[0]]
    kernel = make(site, shape) if shape else None
    return kernel and ResidualKernel(kernel, [later.ty], {later: _saved(0)})


_GAMMA: dict[str, Callable[..., Kernel | None]] = {
    "batch": norm.batch_norm_backward_gamma,
    "instance": norm.instance_norm_backward_gamma,
    "layer": norm.row_norm_backward_gamma,
}


def _saved(index: int):
    return lambda _call, saved: saved[index]


def _sum(_calls: BlockCalls, var: relax.Var, call: relax.Call) -> Found:
    """Return the operand and the axes of a sum."""
    return (call.args[0], _axes(call.attrs.axis, call.args[0].ty.ndim)), (var,)


def _statistics(name: str, where: slice, calls: BlockCalls, _var, call: relax.Call) -> Found | None:
    """Return the data, the axes and the epsilon of the statistics that a gradient is given.

    These are the mean, except for rms_norm, and the inverse deviation.
    """
    data, statistics = call.args[1], tuple(call.args[where])
    *mean, rstd = statistics
    axes = _normalized_axes(call.attrs, name, data.ty.ndim)
    variance, epsilon = _variance(calls, rstd)
    square = _averaged(calls, variance, data, axes)
    product = calls.of(square, "relax.multiply")
    if product is None or not product.args[0].same_as(product.args[1]):
        return None
    if mean:
        middle = _subtracted(calls, product.args[0], data, axes)
        averaged = _averaged(calls, mean[0], data, axes)
        is_found = middle is not None and middle.same_as(mean[0]) and averaged is not None
    else:
        averaged, is_found = product.args[0], True
    is_found = is_found and averaged.same_as(data)
    return ((data, axes, epsilon), statistics) if is_found else None


#: The descriptions of the gradients by name and argument: each is one object, by which calls are indexed once.
_STATISTICS = {
    (name, argument): partial(_statistics, name, where)
    for name, given in _GIVEN.items()
    for argument, where in given.items()
}


def _subtracted(
    calls: BlockCalls, expr: relax.Expr, data: relax.Expr, axes: frozenset[int]
) -> relax.Expr | None:
    """Return ``m`` of ``data - m``, without the axes that broadcast it."""
    centered = calls.of(expr, "relax.subtract")
    if centered is None or not centered.args[0].same_as(data):
        return None
    middle = centered.args[1]
    spread = calls.of(middle, "relax.expand_dims")
    if spread is not None and _axes(spread.attrs.axis, data.ty.ndim) == axes:
        return spread.args[0]
    return middle


def _variance(calls: BlockCalls, rstd: relax.Expr) -> tuple[relax.Expr | None, float | None]:
    """Return ``v`` and ``epsilon`` of ``1 / sqrt(v + epsilon)``."""
    inverse = calls.of(rstd, "relax.divide")
    if inverse is None or _scalar(inverse.args[0]) != 1.0:
        return None, None
    root = calls.of(inverse.args[1], "relax.sqrt")
    total = None if root is None else calls.of(root.args[0], "relax.add")
    epsilon = None if total is None else _scalar(total.args[1])
    return (None, None) if epsilon is None else (total.args[0], epsilon)


def _averaged(
    calls: BlockCalls, expr: relax.Expr | None, data: relax.Expr, axes: frozenset[int]
) -> relax.Expr | None:
    """Return x if an expression is the mean of x over axes, with the extents of the data; else None."""
    total = calls.of(expr, "relax.mean")
    if total is None:
        average = calls.of(expr, "relax.grad.divide_by_count")
        if average is None or not structural_equal(average.args[1].ty.values, data.ty.shape.values):
            return None
        if _axes(average.attrs.axis, data.ty.ndim) != axes:
            return None
        total = calls.of(average.args[0], "relax.sum")
    is_over = total is not None and _axes(total.attrs.axis, data.ty.ndim) == axes
    return total.args[0] if is_over else None


def _normalized_axes(attrs, name: str, ndim: int) -> frozenset[int]:
    if name.startswith("batch_norm"):
        return frozenset(range(ndim)) - {int(attrs.axis) % ndim}
    return _axes(attrs.axes, ndim)


def _summed_axes(attrs, name: str, ndim: int) -> frozenset[int]:
    """Return the axes that the gradient of gamma is a sum over."""
    axes = _normalized_axes(attrs, name, ndim)
    return frozenset(range(ndim)) - axes if name.startswith("layer_norm") else axes


def _axes(axes: Sequence | None, ndim: int) -> frozenset[int]:
    return frozenset(range(ndim) if axes is None else (int(axis) % ndim for axis in axes))


def _scalar(expr: relax.Expr) -> float | None:
    """Return the number that a constant without axes holds, rounded to float32; None for anything else."""
    found = constant_value(expr)
    return _rounded(found) if found is not None and found.ndim == 0 else None


def _rounded(number) -> float:
    """Return a number rounded to float32, as the constants of rules and the attributes of calls hold it."""
    return float(np.float32(number))
