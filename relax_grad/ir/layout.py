"""Layout strings, and the indices of tensors in these layouts.

A capital letter is an axis. A number with a small letter is a part that is split off the axis of
that name: in ``"NCHW4c"`` channel ``c`` is stored at ``c // 4`` of the second axis and at ``c % 4``
of the last. Parts in brackets share an axis, and the last part varies fastest: ``"NCHW[2n4c]"``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tvm import tirx

from .compat import Analyzer

Index = Mapping[str, "tirx.PrimExpr"]

#: The names of the axes that an axis of a stored tensor has, with the extents of their parts.
Axis = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Layout:
    """A layout that TVM has validated.

    Attributes
    ----------
    axes : tuple[tuple[tuple[str, int], ...], ...]
        The content of each axis of the stored tensor: the names of axes, each with the extent of
        the part that is split off, or with 0 for the axis itself.
    """

    axes: tuple[Axis, ...]

    @classmethod
    def of(cls, text: str) -> Layout:
        """Parse a layout string."""
        stored = re.findall(r"\[.*?\]|\d*[A-Za-z]", text)
        return cls(tuple(tuple(map(_part, re.findall(r"\d*[A-Za-z]", axis))) for axis in stored))

    @classmethod
    def together(cls, *texts: str) -> list[Layout]:
        """Parse the layouts of tensors with the same axes.

        A part that all layouts split off in the same way becomes a separate axis (``"c"``), and
        needs no arithmetic.
        """
        layouts = [cls.of(text) for text in texts]
        alike = set.intersection(
            *({axis for axis in layout.axes if axis[0][1]} for layout in layouts)
        )
        own: dict[Axis, Axis] = {
            axis: ((axis[0][0].lower(), 0),) for axis in alike if len(axis) == 1
        }
        return [cls(tuple(own.get(axis, axis) for axis in layout.axes)) for layout in layouts]

    @property
    def names(self) -> str:
        """The names of the axes, in order."""
        return "".join(name for axis in self.axes for name, size in axis if not size)

    @property
    def parts(self) -> dict[str, int]:
        """The axes with a part that is split off, and the extent of this part."""
        return {name: size for axis in self.axes for name, size in axis if size}

    def positions(self, names: Iterable[str]) -> list[int]:
        """Return the positions of the named axes, without the parts that are split off, in the
        stored tensor."""
        return [self.axes.index(((name, 0),)) for name in names]

    def extents(self, shape: Sequence) -> dict:
        """Return the extents of the axes of a tensor, given the shape in which it is stored."""
        parts, names = self.parts, self.names
        extents = [shape[axis] for axis in self.positions(names)]
        return {
            name: extent * parts[name] if name in parts else extent
            for name, extent in zip(names, extents, strict=True)
        }

    def logical(self, index: Sequence[tirx.PrimExpr]) -> dict:
        """Return the index along each axis of the element at an index of the stored tensor."""
        parts = self.parts
        at: dict[str, tirx.PrimExpr] = {}
        for axis, value in zip(self.axes, index, strict=True):
            for name, size in reversed(axis):
                if not size:
                    offset = value * parts[name] if name in parts else value
                elif len(axis) == 1:
                    offset = value
                else:
                    offset, value = tirx.floormod(value, size), tirx.floordiv(value, size)
                at[name] = at[name] + offset if name in at else offset
        return at

    def stored(self, at: Index) -> list:
        """Return the index in the stored tensor of the element with these indices along the
        axes."""
        parts, index = self.parts, []
        for axis in self.axes:
            value = 0
            for name, size in axis:
                if size:
                    value = value * size + tirx.floormod(at[name], size)
                else:
                    value = tirx.floordiv(at[name], parts[name]) if name in parts else at[name]
            index.append(value)
        return index

    def filled_up(self, extents: Index) -> list[str]:
        """Return the axes that may be stored with padding beyond their extents.

        These are the axes whose extents may not be multiples of the extents of their parts.
        """
        divides = Analyzer().can_prove
        return [
            name
            for name, size in self.parts.items()
            if not divides(tirx.floormod(extents[name], size) == 0)
        ]


def _part(text: str) -> tuple[str, int]:
    return text[-1].upper(), int(text[:-1] or 0)
