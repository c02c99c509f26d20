"""Outlines of element-wise nests, which tell whether one loop computes several of them.

An outline has the elements that a nest reads and writes, as numbers of axes. The decision to merge
functions is made from outlines, which are derived once for each function. :func:`_fuse.fuse` makes
the same decision, but would inline and rename the nests of all functions for each pair of calls.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

from tvm import tirx

from ...ir.compat import loaded_buffer
from ._nest import Nest


class Outline(NamedTuple):
    """The elements that a nest reads and writes.

    Attributes
    ----------
    extents : tuple
        The extent of each axis: the dtype and the value of a number, or a variable.
    tensor : Hashable
        The tensor that is written.
    at : tuple
        For each index of the element that is written, the number of the axis, or the dtype and the
        value of a constant.
    reads : tuple[tuple[Hashable, tuple], ...]
        The tensors and the indices of the elements that are read.
    """

    extents: tuple
    tensor: Hashable
    at: tuple
    reads: tuple[tuple[Hashable, tuple], ...]

    def over(self, names: Mapping, extents: Mapping) -> Outline:
        """Return the outline with other tensors and other variables of extents."""
        return Outline(
            tuple(extents.get(extent, extent) for extent in self.extents),
            names[self.tensor],
            self.at,
            tuple((names[tensor], at) for tensor, at in self.reads),
        )


def outlines_of(nests: Sequence[Nest]) -> list[Outline] | None:
    """Return the outlines of nests, in terms of their buffers.

    None if an index is neither an axis nor a constant, or an extent is neither a variable nor a
    constant.
    """
    outlines = []
    for nest in nests:
        extents = tuple(map(_constant_or_variable, (axis.extent for axis in nest.axes)))
        numbers = {axis.var: i for i, axis in enumerate(nest.axes)}
        at = _indices(nest.indices, numbers)
        reads = []
        for load in nest.loads:
            place = _indices(load.indices, numbers)
            if place is None:
                return None
            reads.append((loaded_buffer(load), place))
        if nest.combine or None in extents or at is None:
            return None
        outlines.append(Outline(extents, nest.buffer, at, tuple(reads)))
    return outlines


def _constant_or_variable(expr: tirx.PrimExpr) -> Hashable | None:
    if type(expr) is tirx.IntImm:
        return str(expr.ty.dtype), expr.value
    return expr if isinstance(expr, tirx.Var) else None


def _indices(indices: Sequence[tirx.PrimExpr], numbers: Mapping[tirx.Var, int]) -> tuple | None:
    """Return the numbers of the axes that are indices; None if an index is another expression."""
    places: list[Hashable] = []
    for index in indices[:]:
        if type(index) is tirx.IntImm:
            places.append((str(index.ty.dtype), index.value))
        elif index in numbers:
            places.append(numbers[index])
        else:
            return None
    return tuple(places)


def are_one_loop(outlines: Iterable[Outline]) -> bool:
    """Tell whether one loop computes nests in their order.

    All of them have the same axes and write to the same place. A nest reads results of earlier ones
    only at this place, and overwrites no tensor of earlier ones. It shares a tensor with them.
    """
    first: Outline | None = None
    written: set[Hashable] = set()
    read: set[Hashable] = set()
    for extents, tensor, at, reads in outlines:
        operands = {operand for operand, _ in reads}
        if first is None:
            first = Outline(extents, tensor, at, reads)
        elif (
            tensor in read
            or tensor in written
            or extents != first.extents
            or at != first.at
            or any(operand in written and place != at for operand, place in reads)
            or (operands.isdisjoint(written) and operands.isdisjoint(read))
        ):
            return False
        written.add(tensor)
        read |= operands
    return True
