"""Results of normalisations that gradients use: the statistics, and the gradients of beta and
gamma together."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

from tvm import relax

from . import norm
from .registry import CallSite, Kernel, decompose
from .residuals import BlockCalls, Description, Replacement, ResidualKernel, residuals_for

#: Makes the kernel of a call; if given the shape of further results, the kernel returns these too.
_Make = Callable[..., "Kernel | None"]


def _over_axes(call: relax.Call) -> frozenset[int]:
    """Return the attribute ``axes``."""
    return _axes(call.attrs.axes, call.args[0].ty.ndim)


def _except_axes(call: relax.Call) -> frozenset[int]:
    """Return all axes except the attribute ``axes``."""
    return _axes(None, call.args[0].ty.ndim) - _over_axes(call)


def _except_axis(call: relax.Call) -> frozenset[int]:
    """Return all axes except the attribute ``axis``."""
    ndim = call.args[0].ty.ndim
    return _axes(None, ndim) - _axes([call.attrs.axis], ndim)


def _over_groups(call: relax.Call) -> Hashable:
    """Return the attribute ``axes``, the number of groups, and the axis that they divide."""
    (channel,) = _axes([call.attrs.channel_axis], call.args[0].ty.ndim)
    return _over_axes(call), int(call.attrs.num_groups), channel


def _axes(axes: Sequence | None, ndim: int) -> frozenset[int]:
    return frozenset(range(ndim) if axes is None else (int(axis) % ndim for axis in axes))


class _Normalisation(NamedTuple):
    """A normalisation.

    Attributes
    ----------
    kernel : Callable
        The factory of its kernel.
    statistics : str
        The operator of its statistics, which has the same attributes.
    elements : Callable
        Identifies the elements that share statistics, for a call of either operator.
    """

    kernel: _Make
    statistics: str
    elements: Callable[[relax.Call], Hashable]


class _Gamma(NamedTuple):
    """A gradient of gamma.

    Attributes
    ----------
    kernel : Callable
        The factory of its kernel.
    reduced : Callable
        Returns the axes that the gradient is a sum over.
    """

    kernel: _Make
    reduced: Callable[[relax.Call], frozenset[int]]


_NORMALISATIONS: Mapping[str, _Normalisation] = {
    "relax.nn.batch_norm": _Normalisation(
        norm.batch_norm, "relax.grad.batch_norm_statistics", _except_axis
    ),
    "relax.nn.group_norm": _Normalisation(
        norm.group_norm, "relax.grad.group_norm_statistics", _over_groups
    ),
    "relax.nn.instance_norm": _Normalisation(
        norm.instance_norm, "relax.grad.instance_norm_statistics", _over_axes
    ),
    "relax.nn.layer_norm": _Normalisation(
        norm.layer_norm, "relax.grad.layer_norm_statistics", _over_axes
    ),
    "relax.nn.rms_norm": _Normalisation(
        norm.rms_norm, "relax.grad.rms_norm_statistics", _over_axes
    ),
}

_ELEMENTS = {
    normalisation.statistics: normalisation.elements for normalisation in _NORMALISATIONS.values()
}

_GAMMA: Mapping[str, _Gamma] = {
    "relax.grad.batch_norm_backward_gamma": _Gamma(norm.batch_norm_backward_gamma, _except_axis),
    "relax.grad.instance_norm_backward_gamma": _Gamma(
        norm.instance_norm_backward_gamma, _over_axes
    ),
    "relax.grad.layer_norm_backward_gamma": _Gamma(norm.row_norm_backward_gamma, _except_axes),
}

for _statistics in _ELEMENTS:
    decompose(_statistics)


@residuals_for(*_NORMALISATIONS)
def with_statistics(site: CallSite, var: relax.Var, calls: BlockCalls) -> ResidualKernel | None:
    """Return a normalization that also returns its statistics, for the gradients."""
    make, statistics, elements = _NORMALISATIONS[site.call.op.name]
    forward = calls.original(var)
    # A call without a kernel, such as batch_norm in inference, leaves the statistics to later
    # calls.
    if forward is None or make(site) is None:
        return None
    uses: dict[relax.Var, Replacement] = {}
    key = _key(forward, elements)
    while (replaced := calls.take(var, statistics, _of_same_data, key)) is not None:
        uses[replaced[0]] = _all_saved
    if not uses:
        return None
    kind = next(iter(uses)).ty
    types = kind.fields if isinstance(kind, relax.TupleType) else [kind]
    shape = site.extents(types[0])
    kernel = make(site, shape) if shape else None
    return kernel and ResidualKernel(kernel, types, uses)


@residuals_for(*_GAMMA)
def with_beta(site: CallSite, var: relax.Var, calls: BlockCalls) -> ResidualKernel | None:
    """Return the gradients of gamma and beta; the latter is the sum of the same output
    gradient."""
    backward = calls.original(var)
    if backward is None:
        return None
    make, reduced = _GAMMA[site.call.op.name]
    wanted = backward.args[0], reduced(backward)
    sums = calls.take(var, "relax.sum", _summed, wanted, may_precede=True)
    if sums is None:
        return None
    (beta,) = sums
    shape = site.shape(beta)
    kernel = make(site, shape) if shape else None
    return kernel and ResidualKernel(kernel, [beta.ty], {beta: lambda _call, saved: saved[0]})


def _all_saved(call: relax.Call, saved: Sequence[relax.Var]) -> relax.Expr:
    """Return the saved statistics as the result of the call that would compute them."""
    return relax.Tuple(list(saved)) if isinstance(call.ty, relax.TupleType) else saved[0]


def _of_same_data(_calls: BlockCalls, var: relax.Var, call: relax.Call) -> Description:
    """Describe statistics by their data, elements and epsilon."""
    return _key(call, _ELEMENTS[call.op.name]), (var,)


def _key(call: relax.Call, elements: Callable[[relax.Call], Hashable]) -> Hashable:
    return call.args[0], elements(call), float(call.attrs.epsilon)


def _summed(_calls: BlockCalls, var: relax.Var, call: relax.Call) -> Description:
    """Describe a sum by its operand and axes."""
    return (call.args[0], _axes(call.attrs.axis, call.args[0].ty.ndim)), (var,)
