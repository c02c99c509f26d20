"""The rows of a direct convolution's target: their tiles of pixels, summed in registers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import tirx

from ..language import builder as b
from ..language.builder import Accumulators, Extent, Vectors, bind, const
from ..language.extents import LINE
from ..language.statements import Emit
from ._direct_plan import DirectPlan
from ._packing import View
from .gathering import Taps


@dataclass(frozen=True)
class Block:
    """The block of a task: its source, its sums (``size`` for each image, from ``start`` on), its
    first row and number of rows.

    ``row`` and ``lines`` count rows of a phase; ``height`` counts rows of the target.
    """

    view: View
    sums: tirx.Buffer
    start: tirx.PrimExpr
    size: int
    row: tirx.PrimExpr
    lines: tirx.PrimExpr
    height: tirx.PrimExpr


@dataclass(frozen=True)
class Part:
    """A stretch of a panel: its offset, its first source channel, their number, and its number of
    vectors."""

    panels: tirx.Buffer
    start: tirx.PrimExpr
    first: tirx.PrimExpr
    depth: tirx.PrimExpr
    vectors: int


@dataclass(frozen=True)
class _Row:
    """A row of the target: its number in a phase and in the target, its images, the first and how
    many, and the taps along the rows."""

    index: tirx.PrimExpr
    line: tirx.PrimExpr
    image: tirx.PrimExpr
    together: int
    down: Taps


@dataclass(frozen=True)
class _Tile:
    """A tile of a row.

    Attributes
    ----------
    read, place : tirx.PrimExpr
        The offsets of the first pixel in the source and in the sums.
    spread : list[tuple]
        The distances of each pixel from the first one, in the source and in the sums.
    across : Taps
        The taps along the columns.
    inside : list[list[int]] or None
        The pixels that each tap contributes to; None for all.
    """

    read: tirx.PrimExpr
    place: tirx.PrimExpr
    spread: list[tuple]
    across: Taps
    inside: list[list[int]] | None


class RowGenerator:
    """A generator of the sums of a block's rows.

    Parameters
    ----------
    plan : DirectPlan
        The plan of the convolution.
    multiply : Callable
        Adds a product of vectors to a sum.
    """

    def __init__(self, plan: DirectPlan, multiply: Callable):
        self.plan, self.g, self.multiply = plan, plan.gathering, multiply
        self.vectors = Vectors(plan.lanes)
        self.rows, self.columns = self.g.rows, self.g.columns

    def emit(self, block: Block, part: Part, number: Extent) -> None:
        """Emit the contributions of a stretch of a panel to the images of a block; several images
        may share tiles."""
        together = self.plan.tile_images
        if together > 1:
            with b.serial(0, number // together) as i:
                self._rows(block, part, i * together, together)
            rest = number % together
            if isinstance(rest, tirx.IntImm) and int(rest) == 0:
                return
            with b.serial(0, rest) as i:
                self._rows(block, part, number // together * together + i, 1)
        else:
            with b.serial(0, number) as i:
                self._rows(block, part, i, 1)

    def _rows(self, block: Block, part: Part, image: Extent, together: int) -> None:
        """Emit the rows of an image, or of ``together`` images, phase by phase."""
        phases = self.rows.phases
        image = bind(image)
        if len(phases) == 1:
            with b.serial(0, block.lines) as i:
                self._line(block, part, _Row(i, i, image, together, phases[0]))
            return
        with b.serial(0, len(phases)) as phase:
            taps = self.rows.taps(phase)
            with b.serial(0, block.lines) as i:
                line = bind(i * len(phases) + phase)
                with b.when(line < block.height):
                    self._line(block, part, _Row(i, line, image, together, taps))

    def _line(self, block: Block, part: Part, row: _Row) -> None:
        """Emit the tiles of a row of the target, phase by phase of the columns."""
        plan, view, down = self.plan, block.view, row.down
        line = row.index * self.rows.step + down.offset - self.rows.offsets[0]
        x = bind(view.start + row.image * view.image + line * view.line)
        size_of_row = self.columns.target * plan.width
        out = bind(block.start + row.image * block.size + row.line * size_of_row)
        start = bind((block.row + row.index) * self.rows.step + down.offset)
        for phase, across in enumerate(self.columns.phases):
            count = self.columns.count(phase)
            if count == 0 or across.number == 0:
                continue
            pixels = plan.row_pixels(phase)
            at = x + (across.offset - self.columns.offsets[0])

            def tile(
                first: Extent,
                size: int,
                inside: list[list[int]] | None = None,
                *,
                at: Extent = at,
                phase: int = phase,
                across: Taps = across,
            ) -> None:
                spread = self._spread(block, size, row.together)
                shift = (first * len(self.columns.phases) + phase) * plan.width
                place = bind(out + shift)
                read = bind(at + first * self.columns.step)
                pixels_of = _of_images(inside, size, row.together)
                own = _Tile(read, place, spread, across, pixels_of)
                self._tile(block, part, own, start, down)

            whole, rest = divmod(count, pixels)
            if plan.skips_padding(phase):
                for first in range(0, count, pixels):
                    size = min(pixels, count - first)
                    tile(const(first), size, plan.inside(phase, first, size))
                continue
            if whole > 1:
                with b.serial(0, whole) as j:
                    tile(bind(j * pixels), pixels)
            else:
                tile(const(0), pixels)
            if rest:
                tile(const(whole * pixels), rest)

    def _spread(self, block: Block, size: int, together: int) -> list[tuple]:
        """Return the distances of the pixels of a tile, in the source and in the sums."""
        step = len(self.columns.phases) * self.plan.width
        return [
            (
                i * block.view.image + column * self.columns.step,
                i * block.size + column * step,
            )
            for i in range(together)
            for column in range(size)
        ]

    def _each_row(self, row: Extent, taps: Taps, emit: Emit) -> None:
        """Emit ``emit(p)`` for each tap whose row is in bounds; the first tap reads row ``row``."""
        if self.rows.is_inside:
            with b.serial(0, taps.number) as p:
                emit(p)
        elif taps.move == 1:
            start = bind(tirx.max(const(0), -row))
            stop = tirx.min(taps.number, self.rows.source - row)
            with b.serial(start, bind(tirx.max(start, stop))) as p:
                emit(p)
        else:
            with b.serial(0, taps.number) as p:
                at = bind(row + p * taps.move)
                with b.when(tirx.all(at >= 0, at < self.rows.source)):
                    emit(p)

    def _tile(self, block: Block, part: Part, tile: _Tile, start: Extent, down: Taps) -> None:
        """Emit one tile, whose first tap along the rows reads row ``start``."""
        plan, view, spread = self.plan, block.view, tile.spread
        lanes, width, vectors = plan.lanes, plan.width, part.vectors
        places = [tile.place + offset + v * lanes for _, offset in spread for v in range(vectors)]
        total = Accumulators(self.vectors, len(places))
        for i, place in enumerate(places):
            before = self.vectors.load(block.sums, place)
            total[i] = self.vectors.splat(0) if plan.is_at_once else before
        ahead, across = plan.depth * self.g.taps * width, tile.across

        def add(p: Extent, q: Extent, pixels: Sequence[int]) -> None:
            tap = (down.first + p * down.step) * self.g.kernel[2] + across.first + q * across.step
            panel = bind(part.start + tap * part.depth * width)
            moved = tile.read + p * (down.move * view.line) + q * across.move
            x = bind(moved + part.first * view.channel)
            lines = sorted({spread[i][0] // LINE * LINE for i in pixels})
            with b.serial(0, part.depth) as r:
                at = panel + r * width
                for line in lines if plan.channels_ahead else ():
                    ahead_of = x + (r + plan.channels_ahead) * view.channel + line
                    b.prefetch(view.buffer, ahead_of, level=1)
                row = [bind(self.vectors.load(part.panels, at + v * lanes)) for v in range(vectors)]
                if plan.is_streamed:
                    for v in range(vectors):
                        b.prefetch(part.panels, at + ahead + v * lanes)
                for i in pixels:
                    offset = spread[i][0]
                    value = bind(self.vectors.splat(view.buffer[x + r * view.channel + offset]))
                    for v in range(vectors):
                        index = i * vectors + v
                        total[index] = self.multiply(total[index], value, row[v])

        def line(p: Extent) -> None:
            if tile.inside is None:
                with b.serial(0, across.number) as q:
                    add(p, q, range(len(spread)))
                return
            for q, pixels in enumerate(tile.inside):
                if pixels:
                    add(p, q, pixels)

        self._each_row(start, down, line)
        for i, place in enumerate(places):
            self.vectors.store(block.sums, place, total[i])


def _of_images(inside: list[list[int]] | None, size: int, together: int) -> list[list[int]] | None:
    """Return the pixels that each tap contributes to, of all images that share a tile."""
    if inside is None:
        return None
    return [[i * size + pixel for i in range(together) for pixel in tap] for tap in inside]
