"""Copies of weights and of source images as the kernels of convolutions read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx

from . import _builder as b
from ._builder import bind, const
from ._conv_blocks import Blocking


@dataclass(frozen=True)
class View:
    """Where the source of a block is: the distances of its images, lines and planes in a buffer."""

    buffer: tirx.Buffer
    start: tirx.PrimExpr
    image: int
    line: int
    plane: int


class Packer:
    """Emits the copies.

    Parameters
    ----------
    blocking : Blocking
        How the work is divided.
    """

    def __init__(self, blocking: Blocking):
        self.s, self.g, self.vectors = blocking, blocking.g, blocking.vectors
        self.rows, self.columns = blocking.rows, blocking.columns

    def weight(self, weight, panels) -> None:
        """Copy the weight to ``[group][panel][stretch][tap][source channel][width]``, padded with zeros."""
        g, lanes = self.g, self.vectors.lanes
        with b.parallel(0, g.groups * self.s.panels * self.s.depths) as task:
            panel = bind(task // self.s.depths)
            first, depth = self.s.stretch(task % self.s.depths)
            start = bind((panel * g.sources + first) * (g.taps * self.s.width))
            group, j = bind(panel // self.s.panels), bind(panel % self.s.panels)
            base = bind(group * (g.targets * g.sources * g.taps))
            with b.serial(0, self.s.tile_vectors) as v:
                channel = bind(j * self.s.width + v * lanes)
                left = bind(tirx.max(const(0), tirx.min(const(lanes), g.targets - channel)))
                out = bind(start + v * lanes)
                if g.source_major:
                    with b.serial(0, depth) as r:
                        at = bind(base + ((first + r) * g.targets + channel) * g.taps)

                        def place(tap, out=out, r=r):
                            return out + ((g.taps - 1 - tap) * depth + r) * self.s.width

                        self._transposed(weight, at, g.taps, left, g.taps, panels, place)
                else:
                    at = bind(base + (channel * g.sources + first) * g.taps)
                    step = g.sources * g.taps

                    def place(i, out=out):
                        return out + ((i % g.taps) * depth + i // g.taps) * self.s.width

                    self._transposed(weight, at, step, left, depth * g.taps, panels, place)

    def _transposed(self, source, start, step, left, extent, target, place: Callable) -> None:
        """Copy rows (as many as lanes, of which those exist that are left) to columns."""
        lanes = self.vectors.lanes
        if isinstance(extent, int) and extent == 1 and isinstance(step, int) and step == 1:
            row = self.vectors.load(source, start, left)
            self.vectors.store(target, place(const(0)), row)
            return

        def square(i, number) -> None:
            size = const(lanes) if number is None else number
            size = const(size) if isinstance(size, int) else size
            rows = [
                bind(
                    self.vectors.load(
                        source, start + row * step + i, tirx.Select(left > row, size, const(0))
                    )
                )
                for row in range(lanes)
            ]
            for column, vector in enumerate(self.vectors.transpose(rows)):
                if number is None or (isinstance(number, int) and column < number):
                    self.vectors.store(target, place(i + column), vector)
                elif not isinstance(number, int):
                    with b.when(number > column):
                        self.vectors.store(target, place(i + column), vector)

        self.vectors.each(int(extent) if isinstance(extent, tirx.IntImm) else extent, square)

    def source(self, source, images, row, lines) -> View:
        """Return where the source is read: in place, or from a copy of the block with its padding."""
        g, (image, number) = self.g, images
        plane = self.rows.source * self.columns.source
        if not self.s.is_packed:
            line = bind(image * (g.sources * plane) + row * (self.rows.step * self.columns.source))
            start = line + self.rows.offsets[0] * self.columns.source + self.columns.offsets[0]
            return View(source, start, g.sources * plane, self.columns.source, plane)
        heights = self.rows.extent(self.s.block_rows)
        line = g.sources * self.s.pitch
        copy = b.scratch(self.s.block_images * heights * line + self.vectors.lanes)
        needed = bind((lines - 1) * self.rows.step + self.rows.extent(1))
        first = bind(row * self.rows.step + self.rows.offsets[0])
        with b.serial(0, number) as i, b.serial(0, needed) as y:
            out = bind((i * heights + y) * line)
            at = bind(first + y)
            start = bind(((image + i) * g.sources * self.rows.source + at) * self.columns.source)

            def inside(start=start, out=out) -> None:
                with b.serial(0, g.sources) as r:
                    self._pack_line(source, start + r * plane, copy, bind(out + r * self.s.pitch))

            b.either(
                tirx.all(at >= 0, at < self.rows.source),
                inside,
                lambda out=out: self.vectors.each(
                    line,
                    lambda i, left: self.vectors.store(copy, out + i, self.vectors.splat(0), left),
                ),
            )
        return View(copy, const(0), heights * line, line, self.s.pitch)

    def _pack_line(self, source, start, copy, out) -> None:
        """Copy a line of the source, with the zeros before and after it that are read."""
        offset = self.columns.offsets[0]
        before, skipped = max(0, -offset), max(0, offset)
        extent = max(0, min(self.columns.source - skipped, self.s.pitch - before))
        zeros = self.vectors.splat(0)

        def fill(begin: int, end: int) -> None:
            for i in range(begin, end, self.vectors.lanes):
                self.vectors.store(copy, out + i, zeros, end - i)

        fill(0, min(before, self.s.pitch))
        self.vectors.each(
            extent,
            lambda i, left: self.vectors.store(
                copy, out + before + i, self.vectors.load(source, start + skipped + i, left), left
            ),
        )
        fill(min(before, self.s.pitch) + extent, self.s.pitch)
