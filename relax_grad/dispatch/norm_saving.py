"""What kernels of normalisations save for gradients: the statistics, and the gradient of beta with that of gamma."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import relax
from tvm_ffi import structural_equal

from .._compat import constant_value
from . import norm
from ._registry import Kernel, Site
from ._saving import Calls, Saving, saving_for

#: The gradients that are given the statistics, and where among their arguments these are.
_GIVEN = {
    "batch_norm": {"data": slice(3, 5), "gamma": slice(2, 4)},
    "layer_norm": {"data": slice(3, 5), "gamma": slice(2, 4)},
    "rms_norm": {"data": slice(3, 4), "weight": slice(2, 3)},
}

#: Two constants of float32 are the same number if they differ by no more than this part of it.
_ROUNDING = 1e-6


@saving_for("relax.nn.batch_norm", "relax.nn.layer_norm", "relax.nn.rms_norm")
def with_statistics(site: Site, var: relax.Var, calls: Calls) -> Saving | None:
    """Return a normalization with its statistics, where a gradient is given them computed again."""
    name = site.call.op.name.rpartition(".")[2]
    forward = calls.of(var, site.call.op.name)
    if forward is None:
        return None
    statistics = _recomputed(calls, var, forward, name)
    shape = statistics and site.shape(statistics[0])
    if not shape:
        return None
    kernel = getattr(norm, name)(site, shape)
    uses = {each: _saved(i) for i, each in enumerate(statistics)}
    return kernel and Saving(kernel, [each.ty for each in statistics], uses)


@saving_for(
    "relax.grad.batch_norm_backward_gamma",
    "relax.grad.instance_norm_backward_gamma",
    "relax.grad.layer_norm_backward_gamma",
)
def with_beta(site: Site, var: relax.Var, calls: Calls) -> Saving | None:
    """Return the gradient of gamma with that of beta, which is the sum of the same output gradient."""
    name = site.call.op.name.rpartition(".")[2]
    backward = calls.of(var, site.call.op.name)
    if backward is None:
        return None
    ndim = backward.args[0].ty.ndim
    axes = _summed_axes(backward.attrs, name, ndim)
    for later, call in calls.after(var, "relax.sum"):
        if call.args[0].same_as(backward.args[0]) and _axes(call.attrs.axis, ndim) == axes:
            shape, make = site.shape(later), _GAMMA[name.partition("_norm")[0]]
            kernel = make(site, shape) if shape else None
            return kernel and Saving(kernel, [later.ty], {later: _saved(0)})
    return None


_GAMMA: dict[str, Callable[..., Kernel | None]] = {
    "batch": norm.batch_norm_backward_gamma,
    "instance": norm.instance_norm_backward_gamma,
    "layer": norm.row_norm_backward_gamma,
}


def _saved(index: int):
    return lambda _call, saved: saved[index]


def _recomputed(
    calls: Calls, var: relax.Var, forward: relax.Call, name: str
) -> list[relax.Var] | None:
    """Return the variables of the statistics of a normalization that are computed after it."""
    for argument, where in _GIVEN[name].items():
        for _, call in calls.after(var, f"relax.grad.{name}_backward_{argument}"):
            found = list(call.args[where])
            if (
                call.args[1].same_as(forward.args[0])
                and all(calls.is_after(each, var) for each in found)
                and _are_statistics(calls, forward, name, *found)
            ):
                return found
    return None


def _are_statistics(calls: Calls, forward: relax.Call, name: str, *statistics: relax.Var) -> bool:
    """Tell whether variables are the mean, unless it is none, and the inverse deviation of a normalization."""
    *mean, rstd = statistics
    data = forward.args[0]
    axes = _normalized_axes(forward.attrs, name, data.ty.ndim)
    square = _averaged(calls, _variance(calls, rstd, float(forward.attrs.epsilon)), data, axes)
    product = calls.of(square, "relax.multiply")
    if product is None or not product.args[0].same_as(product.args[1]):
        return False
    if not mean:
        return product.args[0].same_as(data)
    centered = calls.of(product.args[0], "relax.subtract")
    if centered is None or not centered.args[0].same_as(data):
        return False
    middle = centered.args[1]
    spread = calls.of(middle, "relax.expand_dims")
    if spread is not None and _axes(spread.attrs.axis, data.ty.ndim) == axes:
        middle = spread.args[0]
    averaged = _averaged(calls, mean[0], data, axes)
    return middle.same_as(mean[0]) and averaged is not None and averaged.same_as(data)


def _variance(calls: Calls, rstd: relax.Expr, epsilon: float) -> relax.Expr | None:
    """Return ``v`` of ``1 / sqrt(v + epsilon)``."""
    inverse = calls.of(rstd, "relax.divide")
    if inverse is None or not _is_constant(inverse.args[0], 1.0):
        return None
    root = calls.of(inverse.args[1], "relax.sqrt")
    total = None if root is None else calls.of(root.args[0], "relax.add")
    if total is None or not _is_constant(total.args[1], epsilon):
        return None
    return total.args[0]


def _averaged(
    calls: Calls, expr: relax.Expr | None, data: relax.Expr, axes: set[int]
) -> relax.Expr | None:
    """Return what something is the average of over axes; None if it is none."""
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


def _normalized_axes(attrs, name: str, ndim: int) -> set[int]:
    if name.startswith("batch_norm"):
        return set(range(ndim)) - {int(attrs.axis) % ndim}
    return _axes(attrs.axes, ndim)


def _summed_axes(attrs, name: str, ndim: int) -> set[int]:
    """Return the axes that the gradient of gamma is a sum over."""
    axes = _normalized_axes(attrs, name, ndim)
    return set(range(ndim)) - axes if name.startswith("layer_norm") else axes


def _axes(axes: Sequence | None, ndim: int) -> set[int]:
    return set(range(ndim)) if axes is None else {int(axis) % ndim for axis in axes}


def _is_constant(expr: relax.Expr, value: float) -> bool:
    found = constant_value(expr)
    return found is not None and found.ndim == 0 and abs(found - value) <= _ROUNDING * value
