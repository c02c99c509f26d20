"""Kernels of sums over some axes."""

from __future__ import annotations

from functools import partial
from math import prod

from tvm import relax
from tvm.ir import Op

from ..kernel.reduction.reduce import Channels, sum_channels, sum_columns
from .registry import CallSite, Kernel, Shape, kernel_for

_CALL_TIR = Op.get("relax.call_tir")


@kernel_for("relax.sum", "relax.mean")
def sum_over_axes(site: CallSite) -> Kernel | None:
    """Return the kernel of a sum or a mean."""
    axes = site.call.attrs.axis
    ndim = site.call.args[0].ty.ndim
    axes = range(ndim) if axes is None else [int(axis) % ndim for axis in axes]
    return _sum(site, set(axes), site.call.op.name == "relax.mean")


@kernel_for("relax.collapse_sum_to", "relax.collapse_sum_like")
def collapse_sum(site: CallSite) -> Kernel | None:
    """Return the kernel of the adjoint of a broadcast: the sum over the axes that it adds or
    stretches."""
    shapes = site.shapes(site.call.args[0], site.call)
    if shapes is None:
        return None
    shape, result = shapes
    added = len(shape) - len(result)
    stretched = {
        added + axis
        for axis, extent in enumerate(result)
        if isinstance(extent, int) and extent == 1
    }
    return _sum(site, {*range(added), *stretched}, False)


def _sum(site: CallSite, axes: set[int], mean: bool) -> Kernel | None:
    """Return the kernel of a sum over axes; None if the operand may be fused with the sum.

    The sum of all elements has no kernel. Kernels divide only the results among the cores, while
    schedules divide the operand too.
    """
    data = site.call.args[0]
    shapes = site.shapes(data, site.call)
    if shapes is None or _fuses(site, data):
        return None
    groups = _grouped(shapes[0], axes)
    kinds = "".join(kind for kind, _ in groups)
    extents = [extent for _, extent in groups]
    if kinds in ("ks", "sks"):
        outer, channels, inner = [1, 1, *extents][-3:]
        generator = partial(sum_channels, Channels(outer, channels, inner), shapes, site.cpu, mean)
    elif kinds in ("sk", "ksk") and isinstance(extents[-1], int):
        outer, rows, columns = [1, *extents][-3:]
        generator = partial(sum_columns, outer, rows, columns, shapes, site.cpu, mean)
    else:
        return None
    return Kernel(generator, [data])


def _fuses(site: CallSite, expr: relax.Expr) -> bool:
    """Tell whether a tensor is the result of an operator that may be fused with its reduction."""
    value = site.lookup(expr) if isinstance(expr, relax.Var) else None
    return isinstance(value, relax.Call) and isinstance(value.op, Op) and value.op != _CALL_TIR


def _grouped(shape: Shape, axes: set[int]) -> list[tuple]:
    """Merge adjacent axes of one kind, ``"s"`` for summed and ``"k"`` for kept; return kinds and
    extents."""
    groups: list[tuple] = []
    for axis, extent in enumerate(shape):
        if isinstance(extent, int) and extent == 1:
            continue
        kind = "s" if axis in axes else "k"
        if groups and groups[-1][0] == kind:
            groups[-1] = (kind, prod((groups[-1][1], extent)))
        else:
            groups.append((kind, extent))
    return groups
