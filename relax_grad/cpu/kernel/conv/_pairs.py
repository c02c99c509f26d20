"""Packing of convolutions of bfloat16 for the processor's instruction for pairs of elements.

A pair holds the elements of two consecutive source channels, as the 32 bits of a float32. So a
convolution of pairs is one of half as many source channels. An odd last channel is paired with 0.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx

from ..language import builder as b
from ..language.builder import as_expr, bind, const
from ..language.extents import Extent
from ..language.halves import Half, Tensor
from ..matmul.pairs import bits_of, joined, joined_widened
from ._direct_plan import DirectPlan
from ._packing import Packer


class PackerOfPairs(Packer):
    """A generator of the packing code of pairs.

    Parameters
    ----------
    plan : DirectPlan
        The plan of the convolution of pairs.
    channels : int
        The number of source channels of a group.
    """

    def __init__(self, plan: DirectPlan, channels: int):
        super().__init__(plan)
        self.channels = channels

    def _channels(self, source: tuple, stretch: tuple, target: Tensor, place: Callable) -> None:
        first, depth = stretch
        taps, lanes = self.g.kernel[0] * self.g.taps, self.vectors.lanes
        rows = b.scratch(2 * self.s.depth * taps * lanes)

        def row(tap: tirx.PrimExpr, r: tirx.PrimExpr) -> tirx.PrimExpr:
            return (r * taps + tap) * lanes

        number = 2 * depth
        if self.channels % 2:
            number = bind(tirx.min(number, self.channels - 2 * first))
        super()._channels(source, (bind(2 * first), number), rows, row)
        if self.channels % 2:
            with b.when(number % 2 > 0), b.serial(0, taps) as tap:
                self.vectors.store(rows, row(tap, number), self.vectors.splat(0))
        with b.serial(0, depth) as r, b.serial(0, taps) as tap:
            parts = (self.vectors.load(rows, row(tap, 2 * r + i)) for i in range(2))
            self.vectors.store(target, place(tap, r), joined_widened(*parts))

    def _reader(
        self, source: Half, start: tirx.PrimExpr, channel: int, r: tirx.PrimExpr
    ) -> Callable:
        lanes = self.vectors.lanes

        def read(i: tirx.PrimExpr, number: Extent | None) -> tirx.PrimExpr:
            at = bind(start + (2 * r) * channel + i)
            rest = number
            if self.channels % 2:
                whole = as_expr(lanes if number is None else number)
                rest = bind(tirx.Select(2 * r + 1 < self.channels, whole, const(0)))
            first = bits_of(source, at, lanes, number)
            return joined(first, bits_of(source, bind(at + channel), lanes, rest))

        return read
