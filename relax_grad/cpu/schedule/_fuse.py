"""Fusion of loop nests: intermediate results are inlined, or kept in registers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import tvm_ffi
from tvm import tirx
from tvm.ir import Call, Op

from ...ir.compat import Analyzer, BufferLoad, loaded_buffer, structural_map, structural_walk
from ...ir.expressions import substitute
from ...ir.module import IF_THEN_ELSE
from ._access import Accesses
from ._integers import REINTERPRET
from ._nest import Axis, Nest, is_one, is_zero, product, simplified

#: The maximum number of nodes that inlining adds to one consumer.
_LARGEST = 400

#: The functions that one instruction computes.
_INSTRUCTIONS = (REINTERPRET, Op.get("tirx.isnan"))

#: The maximum number of nodes of an expression that is recomputed for several elements.
_CHEAP = 24


@dataclass(frozen=True)
class Group:
    """Nests with the same axes that are computed together; only the first may be a reduction.

    Attributes
    ----------
    nests : Sequence[Nest]
        The nests. They share the variables of the axes.
    stored : set[tirx.Buffer]
        The results that are needed later, or returned.
    stores_last : bool
        Whether all results of an element are computed before the first is stored.
    """

    nests: Sequence[Nest]
    stored: set[tirx.Buffer]
    stores_last: bool = False


def fuse(nests: Sequence[Nest], allocated: Sequence[tirx.Buffer]) -> list[Group]:
    """Return the nests as groups, in order, after inlining."""
    nests = inlined(nests, allocated)
    groups: list[list[Nest]] = []
    for nest in nests:
        for group in _joinable(nest, groups):
            names = {a.var: b.var for a, b in zip(nest.axes, group[0].axes, strict=True)}
            group.append(_renamed(nest, names, group[0].axes))
            break
        else:
            groups.append([nest])
    result = []
    for group in groups:
        inside = {id(nest) for nest in group}
        needed = {
            operand
            for other in groups
            for nest in other
            if id(nest) not in inside
            for operand in nest.operands
        }
        kept = set(allocated) - needed
        result.append(Group(group, {nest.buffer for nest in group} - kept))
    return result


def flat(group: Group, rows: dict) -> Group:
    """Return a group over flat buffers, with axes joined that all accesses traverse at one
    stride."""
    accesses = Accesses(group.nests)
    at = {axis.var: axis.var for axis in [*accesses.axes, *accesses.reduced]}
    nests = [
        replace(
            nest,
            axes=accesses.axes,
            buffer=rows[nest.buffer],
            indices=[accesses.place(store, at)],
            value=accesses.rewrite(nest.value, at, rows, {}),
            reduced=accesses.reduced if nest.combine else (),
        )
        for nest, store in zip(group.nests, accesses.stores, strict=True)
    ]
    return replace(group, nests=nests, stored={rows[buffer] for buffer in group.stored})


# Inlining


def inlined(nests: Sequence[Nest], allocated: Collection[tirx.Buffer]) -> list[Nest]:
    """Return the nests with producers of intermediate buffers inlined into their consumers."""
    allocated = set(allocated)
    kept: list[Nest] = []
    rest = [simplified(nest) for nest in nests]
    while rest:
        nest, *rest = rest
        users = [i for i, other in enumerate(rest) if _reads(other, nest.buffer)]
        names = _inverse(nest)
        if (
            nest.buffer in allocated
            and names is not None
            and _is_whole(nest)
            and not any(_reads(other, nest.buffer) for other in kept)
            and not any(other.buffer.same_as(nest.buffer) for other in (*kept, *rest))
            and not (users and _is_overwritten(nest, rest[: users[-1]]))
            and not (users and _overwrites(rest[users[-1]], nest, names))
            and all(_is_worth_it(nest, rest[i], len(users)) for i in users)
        ):
            for i in users:
                rest[i] = simplified(_with_inlined(rest[i], nest, names))
        else:
            kept.append(nest)
    return kept


def _is_whole(nest: Nest) -> bool:
    """Tell whether a nest with an :func:`_inverse` writes every element of its buffer."""
    extents = {axis.var: axis.extent for axis in nest.axes}
    known = Analyzer()
    return all(
        known.can_prove_equal(extents[index], extent)
        if isinstance(index, tirx.Var)
        else is_zero(index) and is_one(extent)
        for index, extent in zip(nest.indices, nest.buffer.shape, strict=True)
    )


def _is_overwritten(nest: Nest, later: Sequence[Nest]) -> bool:
    """Tell whether an operand of a nest is written to by a later nest."""
    return any(other.buffer in nest.operands for other in later)


def _overwrites(user: Nest, nest: Nest, names: list) -> bool:
    """Tell whether a consumer writes to an element that another iteration of the inlined nest
    reads."""
    if user.buffer not in nest.operands:
        return False
    values = _with_inlined(user, nest, names).loads
    return not all(
        tvm_ffi.structural_equal(list(load.indices), list(user.indices))
        for load in values
        if loaded_buffer(load).same_as(user.buffer)
    )


def _reads(nest: Nest, buffer: tirx.Buffer) -> bool:
    return buffer in nest.operands


def _inverse(nest: Nest) -> list | None:
    """Return the axis of each index (None for an index that is not an axis).

    None for a reduction, or if an axis of extent other than 1 is not an index by itself.
    """
    if nest.combine:
        return None
    names = [index if isinstance(index, tirx.Var) else None for index in nest.indices]
    wanted = {axis.var for axis in nest.axes if axis.size != 1}
    axes = {name for name in names if name is not None}
    is_plain = len(axes) == sum(name is not None for name in names)
    return names if is_plain and wanted <= axes else None


def _is_worth_it(nest: Nest, user: Nest, users: int) -> bool:
    """Tell whether to recompute a nest in a consumer."""
    nodes, calls, conditions = weigh(nest.value)
    uses = sum(loaded_buffer(load).same_as(nest.buffer) for load in user.loads)
    if nodes * uses > _LARGEST:
        return False
    if _is_as_large(nest, user):
        return not (user.combine and calls and users > 1)
    return not calls and nodes <= _CHEAP and not (user.combine and conditions)


def _is_as_large(nest: Nest, user: Nest) -> bool:
    sizes = [product([a.extent for a in [*side.axes, *side.reduced]]) for side in (nest, user)]
    return Analyzer().can_prove_equal(*sizes)


def weigh(expr: tirx.PrimExpr) -> tuple[int, int, int]:
    """Return the number of nodes of an expression, of function calls, and of conditions."""
    counts = [0, 0, 0]

    def visit(node: tirx.PrimExpr) -> None:
        counts[0] += 1
        if isinstance(node, Call) and not any(map(node.op.same_as, _INSTRUCTIONS)):
            counts[2 if node.op.same_as(IF_THEN_ELSE) else 1] += 1
        elif isinstance(node, tirx.Select):
            counts[2] += 1

    structural_walk(expr, (tuple(_OPERATIONS), visit))
    return counts[0], counts[1], counts[2]


_OPERATIONS = (
    *(tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Mod, tirx.FloorDiv, tirx.FloorMod),
    *(tirx.Min, tirx.Max, tirx.EQ, tirx.NE, tirx.LT, tirx.LE, tirx.GT, tirx.GE),
    *(tirx.And, tirx.Or, tirx.Not, tirx.Select, tirx.Cast, tirx.Let, Call, BufferLoad),
)


def _with_inlined(user: Nest, nest: Nest, names: list) -> Nest:
    zeros = {axis.var: tirx.IntImm(str(axis.var.ty.dtype), 0) for axis in nest.axes}

    def load(old: tirx.PrimExpr) -> tirx.PrimExpr:
        if not loaded_buffer(old).same_as(nest.buffer):
            return old
        values = {name: i for name, i in zip(names, old.indices, strict=True) if name is not None}
        return substitute(nest.value, {**zeros, **values})

    return replace(user, value=structural_map(user.value, (BufferLoad, load)))


# Grouping


def _joinable(nest: Nest, groups: list[list[Nest]]) -> Iterator[list[Nest]]:
    """Yield the groups that a nest can join, the latest first, up to the first one with a
    dependence."""
    if nest.combine:
        return
    for group in groups[::-1]:
        # Nests of a group are computed element by element, so the nest must not overwrite a tensor
        # of the group.
        if any(
            _reads(member, nest.buffer) or member.buffer.same_as(nest.buffer) for member in group
        ):
            return
        if _have_same_axes(nest, group[0]) and _goes_along(nest, group):
            yield group
        if any(_reads(nest, member.buffer) for member in group):
            return


def _have_same_axes(nest: Nest, other: Nest) -> bool:
    extents, others = ([axis.extent for axis in side.axes] for side in (nest, other))
    return len(extents) == len(others) and tvm_ffi.structural_equal(extents, others)


def _goes_along(nest: Nest, group: list[Nest]) -> bool:
    """Tell whether a nest shares operands with a group, and reads the group's results only at the
    same element."""
    names = {a.var: b.var for a, b in zip(nest.axes, group[0].axes, strict=True)}
    indices = [substitute(index, names) for index in nest.indices]
    if not tvm_ffi.structural_equal(indices, list(group[0].indices)):
        return False
    nest = _renamed(nest, names, group[0].axes)
    made = {member.buffer: member.indices for member in group}
    is_user = False
    for load in nest.loads:
        written = made.get(loaded_buffer(load))
        if written is not None:
            is_user = True
            if not tvm_ffi.structural_equal(list(load.indices), list(written)):
                return False
    if is_user or group[0].combine:
        return is_user
    return any(not nest.operands.isdisjoint(member.operands) for member in group)


def _renamed(nest: Nest, names: dict, axes: Sequence[Axis]) -> Nest:
    return replace(
        nest,
        axes=axes,
        indices=[substitute(index, names) for index in nest.indices],
        value=substitute(nest.value, names),
    )
