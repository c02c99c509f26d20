"""Sums of contributions to gradients: maps, reductions and ordered scatters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import tvm_ffi
from tvm import tirx

from ..ir.compat import BufferLoad, loaded_buffer
from ..ir.expressions import loads, substitute
from . import emit
from .access import Gather, Range, gather, renamed
from .derivatives import Contribution
from .flat import same
from .statements import (
    Loop,
    Store,
    bounds_of_data,
    cast,
    conjunction,
    dtype_of,
    guarded,
    mapped,
    negated,
)

#: The elements of a cache line, the smallest part of the last dimension that one thread adds to in
#: a scatter.
_LINE = 16

#: The most parts of the last dimension.
_PARTS = 16


def added(
    name: str,
    loops: Sequence[Range],
    target: tirx.Var,
    has_value: bool,
    contributions: Sequence[Contribution],
) -> list[tirx.Stmt]:
    """Return the statements ``target[source] += value`` for contributions in all iterations of
    loops.

    Parameters
    ----------
    name : str
        The name of the blocks.
    loops : Sequence[Range]
        The loops.
    target : tirx.Var
        The buffer.
    has_value : bool
        Whether the buffer has a value; if not, it starts from 0.
    contributions : Sequence[Contribution]
        The contributions.
    """
    statements: list[tirx.Stmt] = []
    maps, sums, scatters = [], [], []
    for contribution in contributions:
        gathered = gather(contribution.source.indices, target.shape, loops)
        if gathered is None:
            scatters.append(contribution)
        elif gathered.reduced:
            sums.append((gathered, contribution))
        else:
            maps.append((gathered, contribution))
    dtype = dtype_of(target)
    if maps or (not sums and not has_value):
        axes, total = _sum_of_maps(maps, target, dtype)
        indices = [axis.var for axis in axes]
        if has_value:
            total = emit.load(target, indices) + total
        store = tirx.BufferStore(target, total, indices)
        statements.append(emit.block(name, [(axis, emit.SPATIAL) for axis in axes], store))
        has_value = True
    for gathered, contribution in sums:
        statements.append(
            _reduction(name, target, dtype, gathered, contribution, has_value=has_value)
        )
        has_value = True
    statements += [_scatter(name, target, dtype, loops, contribution) for contribution in scatters]
    return statements


def _sum_of_maps(
    maps: Sequence[tuple[Gather, Contribution]], target: tirx.Var, dtype: str
) -> tuple[list[Range], tirx.PrimExpr]:
    """Return new axes of a buffer, and the sum of contributions to each element."""
    axes: list[Range] = []
    total = None
    for gathered, contribution in maps:
        names = {}
        if axes:
            names = {own.var: axis.var for own, axis in zip(gathered.axes, axes, strict=True)}
        else:
            axes = list(gathered.axes)
        value = substitute(_at(gathered, contribution, dtype), names)
        total = value if total is None else total + value
    if total is None:
        axes = axes_of(target)
        total = tirx.const(0.0, dtype)
    return axes, total


def merged(contributions: Sequence[Contribution]) -> list[Contribution]:
    """Return the sums of contributions to the same element under the same conditions."""
    kept: list[Contribution] = []
    for contribution in contributions:
        for i, other in enumerate(kept):
            if same([contribution.source, *contribution.guards], [other.source, *other.guards]):
                kept[i] = replace(other, value=other.value + contribution.value)
                break
        else:
            kept.append(contribution)
    return kept


def axes_of(buffer: tirx.Var) -> list[Range]:
    return [
        Range(tirx.Var(f"j{i}", "int64"), tirx.IntImm("int64", 0), cast(extent, "int64"))
        for i, extent in enumerate(buffer.shape)
    ]


def _at(gathered: Gather, contribution: Contribution, dtype: str) -> tirx.PrimExpr:
    """Return the contribution to the element that a gather names, 0 where it has none."""
    value = cast(_with_values(contribution.value, gathered), dtype)
    zero = tirx.const(0.0, dtype)
    for guard in reversed([_with_values(guard, gathered) for guard in contribution.guards]):
        if loads(guard):
            # TVM joins nested selections with equal constants at the end, and evaluates both
            # conditions always.
            value = tirx.if_then_else(negated(guard), zero, value)
        else:
            value = tirx.if_then_else(guard, value, zero)
    if gathered.guards:
        value = tirx.if_then_else(conjunction(gathered.guards), value, tirx.const(0.0, dtype))
    return value


def _with_values(expr: tirx.PrimExpr, gathered: Gather) -> tirx.PrimExpr:
    """Return an expression in terms of an element, with simple indices."""
    analyzer = gathered.analyzer()

    def change(node: BufferLoad) -> tirx.PrimExpr:
        indices = [analyzer.simplify(substitute(index, gathered.values)) for index in node.indices]
        return emit.load(loaded_buffer(node), indices)

    expr = tvm_ffi.structural_map(expr, (BufferLoad, change), order="post")
    return substitute(expr, gathered.values)


def _reduction(
    name: str,
    target: tirx.Var,
    dtype: str,
    gathered: Gather,
    contribution: Contribution,
    has_value: bool,
) -> tirx.Stmt:
    """Return the sum of a contribution over the remaining loops."""
    reduced, names = renamed(gathered.reduced)
    value = substitute(_at(gathered, contribution, dtype), names)
    indices = [axis.var for axis in gathered.axes]
    body = tirx.BufferStore(target, emit.load(target, indices) + value, indices)
    init = None if has_value else tirx.BufferStore(target, tirx.const(0.0, dtype), indices)
    axes = [(axis, emit.SPATIAL) for axis in gathered.axes]
    return emit.block(name, [*axes, *((axis, emit.REDUCED) for axis in reduced)], body, init)


def _scatter(
    name: str, target: tirx.Var, dtype: str, loops: Sequence[Range], contribution: Contribution
) -> tirx.Stmt:
    """Return an ordered sum, which drops indices out of bounds."""
    indices = contribution.source.indices
    value = emit.load(target, indices) + cast(contribution.value, dtype)
    guards = [*contribution.guards, *bounds_of_data(target, indices)]
    statement = guarded(guards, Store(target, tuple(indices), value))
    plain = [
        loop for loop in loops
        if any(isinstance(index, tirx.Var) and index.same_as(loop.var) for index in indices)
    ]  # fmt: skip
    inner = [loop for loop in loops if not any(loop is other for other in plain)]
    size = plain[-1].size if plain and inner else None
    if size and size % _LINE == 0:
        # The threads divide the last dimension into whole cache lines, and each runs along its own.
        *plain, last = plain
        lines = size // _LINE
        width = size // max(i for i in range(1, _PARTS + 1) if lines % i == 0)
        dtype = str(last.var.ty.dtype)
        line, lane = (tirx.Var(f"{last.var.name}_{i}", dtype) for i in range(2))
        value = last.start + line * tirx.IntImm(dtype, width) + lane
        statement = mapped(statement, lambda expr: substitute(expr, {last.var: value}))
        zero = tirx.IntImm(dtype, 0)
        plain.append(Range(line, zero, tirx.IntImm(dtype, size // width)))
        inner.append(Range(lane, zero, tirx.IntImm(dtype, width)))
    for loop in reversed([*plain, *inner]):
        statement = Loop(loop.var, loop.start, loop.extent, (statement,))
    return emit.general_block(name, [statement])


def under(guards: Sequence[tirx.PrimExpr], body: tirx.Stmt) -> tirx.Stmt:
    for guard in reversed(guards):
        body = tirx.IfThenElse(guard, body, None)
    return body


def copied(source: tirx.Var, target: tirx.Var) -> tirx.Stmt:
    """Return a copy of a buffer, in the dtype of the target."""
    axes = axes_of(source)
    indices = [axis.var for axis in axes]
    value = cast(emit.load(source, indices), dtype_of(target))
    return emit.block(
        f"{target.name}_copy",
        [(axis, emit.SPATIAL) for axis in axes],
        tirx.BufferStore(target, value, indices),
    )
