"""The rows and columns of images that convolutions by tiles (AMX) copy."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from tvm import tirx

from ..language.builder import as_expr, bind, ceil_div, const
from ..language.halves import Half
from .gathering import Axis, Taps


@dataclass(frozen=True)
class Lines:
    """The positions along an axis in planes: position ``i`` of the planes of a remainder has the
    source element ``(i + first) * step + remainder``."""

    axis: Axis

    @cached_property
    def floors(self) -> tuple[int, int]:
        """The first and the last offset of all taps, in steps."""
        first, last = self.axis.offsets
        return first // self.axis.step, last // self.axis.step

    @cached_property
    def remainders(self) -> list[int]:
        """The remainders that taps read."""
        offsets = [offset for taps in self.axis.phases for offset in taps.offsets]
        return sorted({offset % self.axis.step for offset in offsets})

    def remainder(self, number: tirx.PrimExpr) -> tirx.PrimExpr:
        """Return a remainder, given its number, which may be an expression."""
        value = const(self.remainders[0])
        for i, other in enumerate(self.remainders[1:], 1):
            value = tirx.Select(tirx.EQ(number, const(i)), const(other), value)
        return value

    @property
    def span(self) -> int:
        """The positions that an element reads."""
        return self.floors[1] - self.floors[0] + 1

    def inside(self, remainder: int, count: int) -> tuple[int, int]:
        """Return the first of the positions that are elements of the source, among ``count``, and
        the one after the last."""
        step, first, source = self.axis.step, self.floors[0], self.axis.source
        begin = max(0, ceil_div(-remainder, step) - first)
        end = min(count, ceil_div(source - remainder, step) - first)
        return min(begin, count), max(min(begin, count), end)

    def place(self, taps: Taps, j: tirx.PrimExpr) -> tuple:
        """Return the number of the remainder that a tap reads, and its position."""
        step = self.axis.step
        offset = bind(as_expr(taps.offset) + j * taps.move)
        if step == 1:
            return const(0), bind(offset - self.floors[0])
        remainder = bind(tirx.floormod(offset, const(step)))
        number = const(0)
        for i, value in enumerate(self.remainders[1:], 1):
            number = tirx.Select(tirx.EQ(remainder, const(value)), const(i), number)
        return bind(number), bind(tirx.floordiv(offset, const(step)) - self.floors[0])


def elements_of(source: Half, at: tirx.PrimExpr) -> tirx.PrimExpr:
    """Return the bits of an element."""
    return source.raw[bind(at)]
