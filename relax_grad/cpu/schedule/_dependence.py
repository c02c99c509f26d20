"""Analysis of dependences between the iterations of a loop nest.

A block's axis types are claims of its author, and TVM's schedules trust them: an axis may be
declared ``spatial`` although elements are overwritten along it, or read one iteration later. Here,
independence is proved from the indices, and never assumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import tvm_ffi
from tvm import tirx
from tvm.ir import Call, Op

from ...ir.compat import detect_linear_equation, loaded_buffer, structural_walk
from ...ir.expressions import loads, variables

#: ``TCallEffectKind`` of calls without effects: annotations of expressions, and pure functions.
_PURE = 1

#: Pure calls that return an address, through which any element of a tensor may be read or written.
_ADDRESS_OF = ("tirx.address_of", "tirx.tvm_access_ptr")


class Axis(Protocol):
    """A variable that runs from 0 to an extent."""

    @property
    def var(self) -> tirx.Var: ...

    @property
    def extent(self) -> tirx.PrimExpr: ...

    @property
    def size(self) -> int | None:
        """The extent, or None if it is symbolic."""


def is_pure(code: tirx.PrimExpr | tirx.Stmt) -> bool:
    """Tell whether the loads and stores of an expression or a statement are its only effects.

    Such an expression may be computed several times, in any order, and in vectors.
    """
    is_known = True

    def visit(call: Call) -> None:
        nonlocal is_known
        effect = call.op.get_attr("TCallEffectKind") if isinstance(call.op, Op) else None
        is_known &= effect is not None and int(effect) <= _PURE and call.op.name not in _ADDRESS_OF

    structural_walk(code, (Call, visit))
    return is_known


_DIVISIONS = (tirx.FloorDiv, tirx.FloorMod, tirx.Div, tirx.Mod)


def are_disjoint(
    accesses: Sequence[Sequence[tirx.PrimExpr]], axes: Sequence[Axis], inner: Sequence[Axis] = ()
) -> bool:
    """Tell whether different iterations of axes touch different elements of a tensor.

    Parameters
    ----------
    accesses : Sequence[Sequence[tirx.PrimExpr]]
        The indices of each read and write of the tensor in one iteration; at least one.
    axes : Sequence[Axis]
        The axes of the iterations.
    inner : Sequence[Axis]
        Loops within an iteration.

    Returns
    -------
    are_disjoint : bool
        True only if it is proved: if the dimensions in which all accesses have the same index
        determine all axes.
    """
    shared = [
        indices[0]
        for indices in zip(*accesses, strict=True)
        if all(tvm_ffi.structural_equal(indices[0], other) for other in indices[1:])
    ]
    unknown = {axis.var: axis for axis in axes if axis.size != 1}
    plain = {index for index in shared if isinstance(index, tirx.Var)}
    if plain.issuperset(unknown):  # each index determines its axis
        return True
    determined = set(unknown)
    while unknown and determined:
        determined = {var for index in shared for var in _determined(index, unknown, axes, inner)}
        for var in determined:
            del unknown[var]
    return not unknown


def _determined(
    index: tirx.PrimExpr, unknown: dict[tirx.Var, Axis], axes: Sequence[Axis], inner: Sequence[Axis]
) -> set[tirx.Var]:
    """Return the unknown axes whose values follow from an index and the other axes' values."""
    names = variables(index)
    own = [axis for var, axis in unknown.items() if var in names]
    if not own or loads(index) or not names <= {axis.var for axis in (*axes, *inner)}:
        return set()
    terms = [*own, *(axis for axis in inner if axis.var in names)]
    parts = detect_linear_equation(index, [axis.var for axis in terms])
    if not len(parts) or not all(isinstance(part, tirx.IntImm) for part in parts[:-1]):
        return set()
    factors = sorted((abs(int(part)), i) for i, part in enumerate(parts[:-1]))
    # Like digits of a number: each factor exceeds the sum of all lower terms. Terms of loops
    # below the terms of all axes may overlap.
    reached, is_digit = 0, False
    for rank, (factor, i) in enumerate(factors):
        is_digit |= i < len(own)
        if is_digit and factor <= reached:
            return set()
        size = terms[i].size
        if size is None and rank < len(factors) - 1:
            return set()
        reached += factor * ((size or 1) - 1)
    return {axis.var for axis in own}


def touched(code: tirx.PrimExpr | tirx.Stmt, buffer: tirx.Buffer) -> list[Sequence[tirx.PrimExpr]]:
    """Return the indices of all reads and writes of a tensor in a statement."""
    accesses = [load.indices for load in loads(code) if loaded_buffer(load).same_as(buffer)]
    stores: list[tirx.BufferStore] = []
    structural_walk(code, (tirx.BufferStore, stores.append))
    return accesses + [store.indices for store in stores if store.buffer.same_as(buffer)]


def divides(expr: tirx.PrimExpr, variable: tirx.Var) -> bool:
    """Tell whether a variable occurs in a division or a remainder."""
    divisions: list[tirx.PrimExpr] = []
    structural_walk(expr, (_DIVISIONS, divisions.append))
    return any(variable in variables(division) for division in divisions)
