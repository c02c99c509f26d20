"""Layout strings, and the indices of tensors that are stored in them.

A capital is an axis. A small letter behind a number is a part that is split off the axis of that name:
in ``"NCHW4c"`` channel ``c`` stands at ``c // 4`` of the second axis and at ``c % 4`` of the last. Parts in
brackets share an axis, the last one fastest: ``"NCHW[2n4c]"``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tvm import tirx

from .compat import Analyzer

Index = Mapping[str, "tirx.PrimExpr"]


@dataclass(frozen=True)
class Layout:
    """A layout, of which TVM has checked that it is one.

    Attributes
    ----------
    axes : tuple[tuple[tuple[str, int], ...], ...]
        What each axis of the stored tensor holds: the names of axes, each with the extent of the part
        that is split off it, or with 0 for the axis itself.
    """

    axes: tuple[tuple[tuple[str, int], ...], ...]

    @classmethod
    def of(cls, text: str) -> Layout:
        """Read a layout string."""
        stored = re.findall(r"\[.*?\]|\d*[A-Za-z]", text)
        return cls(tuple(tuple(map(_part, re.findall(r"\d*[A-Za-z]", axis))) for axis in stored))

    @classmethod
    def together(cls, *texts: str) -> list[Layout]:
        """Read the layouts of tensors with the same axes.

        A part that all of them split off alike is an axis of its own (``"c"``) here, and needs no
        arithmetic.
        """
        layouts = [cls.of(text) for text in texts]
        alike = set.intersection(
            *({axis for axis in layout.axes if axis[0][1]} for layout in layouts)
        )
        own = {axis: ((axis[0][0].lower(), 0),) for axis in alike if len(axis) == 1}
        return [cls(tuple(own.get(axis, axis) for axis in layout.axes)) for layout in layouts]

    @property
    def names(self) -> str:
        """The names of the axes, in order."""
        return "".join(name for axis in self.axes for name, size in axis if not size)

    @property
    def parts(self) -> dict[str, int]:
        """The axes that a part is split off, and its extent."""
        return {name: size for axis in self.axes for name, size in axis if size}

    def positions(self, names: Iterable[str]) -> list[int]:
        """Return where the named axes, without the parts that are split off, are stored."""
        return [self.axes.index(((name, 0),)) for name in names]

    def extents(self, shape: Sequence) -> dict:
        """Return the extents of the axes of a tensor that is stored in a shape."""
        parts, names = self.parts, self.names
        extents = [shape[axis] for axis in self.positions(names)]
        return {
            name: extent * parts[name] if name in parts else extent
            for name, extent in zip(names, extents, strict=True)
        }

    def logical(self, index: Sequence[tirx.PrimExpr]) -> dict:
        """Return the index along each axis of the element that is stored at an index."""
        parts, at = self.parts, {}
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
        """Return the index at which the element at an index along each axis is stored."""
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
        """Return the axes that may be stored with elements beyond their extents.

        Those are the axes whose extent the part that is split off may not divide.
        """
        divides = Analyzer().can_prove
        return [
            name
            for name, size in self.parts.items()
            if not divides(tirx.floormod(extents[name], size) == 0)
        ]


def _part(text: str) -> tuple[str, int]:
    return text[-1].upper(), int(text[:-1] or 0)
