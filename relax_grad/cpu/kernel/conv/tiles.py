"""Convolutions of images and volumes of bfloat16, and their data gradients, by tiles (AMX), NCHW
with OIHW.

A target image is a sum of matrix products, one for each tap: ``target[v, pixel] += weight[v, r]
source[r, pixel + offset]``. A task copies the rows of the source that it reads as planes of pairs
of channels, ``[pair of channels][row][column]``, with their padding. A row of a tile of B is then a
part of a plane, and a tap is an offset in it: the sums of 32 consecutive pixels, which may be on
several rows, are computed at once. Sums of columns between two rows are not stored.

Where a target element is a step of several source elements from the next one, each remainder of
rows and of columns by the step has separate planes, so that the elements which consecutive
target elements read are neighbours.

A volume is a sum of convolutions of images: a task copies the planes of each slice that an image of
the target reads, except slices out of bounds.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx

from ..language import amx
from ..language import builder as b
from ..language.builder import Vectors, bind, ceil_div, const
from ..language.epilogue import biases_from
from ..language.extents import Extent
from ..language.halves import Half, Tensor
from ..language.stealing import shared
from ..language.vectors import interleaved
from ..matmul.pairs import bits_of, joined
from ._amx_lines import elements_of
from ._packing import Images
from ._tiles_plan import STEP, TilesPlan
from .gathering import Taps


@dataclass(frozen=True)
class _Target:
    """Where the sums of a block of target channels go."""

    buffer: tirx.Buffer
    start: tirx.PrimExpr
    row: tirx.PrimExpr
    lines: tirx.PrimExpr
    phase: tirx.PrimExpr


class ConvTiles:
    """A generator of convolutions by tiles.

    Parameters
    ----------
    plan : TilesPlan
        The plan of the convolution.
    """

    def __init__(self, plan: TilesPlan):
        self.plan, self.g, self.vectors = plan, plan.gathering, Vectors(plan.lanes)
        self.rows, self.columns = plan.rows, plan.columns

    def emit(self, source: Half, weight: Half, target: Tensor) -> None:
        """Emit the copy of the weight, and the tasks."""
        g = self.g
        tiles = b.scratch(g.groups * self.plan.blocks * self.plan.weights, "uint16")
        self._copy_weight(weight, tiles)
        blocks = bind(const(1) * g.images * self.plan.row_blocks)
        with shared(self.plan.parts * blocks, self.plan.cores) as task:
            part, block = bind(task // blocks), bind(task % blocks)
            image = Images.of(g, bind(block // self.plan.row_blocks), const(1))
            first = bind(block % self.plan.row_blocks * self.plan.task_rows)
            lines = bind(tirx.min(const(self.plan.task_rows), g.rows.count() - first))
            each = ceil_div(self.plan.blocks, self.plan.parts)
            begin = bind(part * each)
            end = bind(tirx.min(begin + each, const(self.plan.blocks)))
            # Tiles of the last rows read beyond the last plane.
            planes = b.scratch(
                self.plan.slices * self.plan.slice + amx.COLUMNS + self.vectors.lanes
            )
            image.each_tap(
                g.slices,
                lambda tap: self._copy_source(source, planes, (image, tap), first, lines),
            )
            with amx.tiles(self.plan.height):
                self._image(
                    planes, tiles, target, image=image, rows=(first, lines), blocks=(begin, end)
                )

    # Copies

    def _copy_weight(self, weight: Half, tiles: tirx.Buffer) -> None:
        """Emit the copy of the weight as ``[group][block][tap][target][source]``, read in the order
        of its memory."""
        g = self.g
        with b.parallel(0, g.groups * self.plan.blocks) as block:
            group, first = (
                bind(block // self.plan.blocks),
                bind(block % self.plan.blocks * self.plan.height),
            )
            start = bind(block * self.plan.weights)
            if g.targets % self.plan.height or g.sources % STEP:
                b.clear(tiles, start, self.plan.weights)
            number = bind(tirx.min(const(self.plan.height), g.targets - first))

            def copy(v: tirx.PrimExpr, r: tirx.PrimExpr) -> None:
                if g.source_major:
                    channel = (group * g.sources + r) * g.targets + first + v
                else:
                    channel = (group * g.targets + first + v) * g.sources + r
                at, to = bind(channel * self.plan.taps), bind(start + v * self.plan.pitch + r)
                with b.serial(0, g.kernel[0]) as i:
                    for j in range(g.taps):
                        tap = i * g.taps + j
                        place = self.plan.taps - 1 - tap if g.source_major else tap
                        each = place * (self.plan.height * self.plan.pitch)
                        b.store(tiles, to + each, weight.raw[bind(at + tap)])

            if g.source_major:
                with b.serial(0, g.sources) as r, b.serial(0, number) as v:
                    copy(v, r)
            else:
                with b.serial(0, number) as v, b.serial(0, g.sources) as r:
                    copy(v, r)

    def _copy_source(
        self,
        source: Half,
        planes: tirx.Buffer,
        part: tuple[Images, tirx.PrimExpr],
        first: tirx.PrimExpr,
        lines: tirx.PrimExpr,
    ) -> None:
        """Emit the copy of the rows of an image that a task reads: of the slice of a tap."""
        (image, tap), g, rows, columns = part, self.g, self.rows, self.columns
        plane = g.rows.stored * g.columns.stored
        stored = g.slices.stored * plane
        above = bind((image.slice + tap * image.taps.move) * (g.slices.apart * plane))
        number = bind(lines + (rows.span - 1))
        for i, down in enumerate(rows.remainders):
            for j, across in enumerate(columns.remainders):
                at = i * len(columns.remainders) + j
                begin = tap * self.plan.slice + at * (self.plan.steps * amx.STEPS * self.plan.plane)
                with b.serial(0, self.plan.steps * amx.STEPS) as pair:
                    channel = bind(image.volume * g.sources + 2 * pair)
                    start = bind(begin + pair * self.plan.plane)
                    exists = bind(tirx.min(const(2), g.sources - 2 * pair))
                    with b.serial(0, number) as y:
                        line = bind((first + y + rows.floors[0]) * g.rows.step + down)
                        to = bind(start + y * self.plan.distance)
                        down_here = line * (g.rows.apart * g.columns.stored)
                        here = bind(channel * stored + above + down_here)

                        def copy(
                            here: tirx.PrimExpr = here,
                            to: tirx.PrimExpr = to,
                            exists: tirx.PrimExpr = exists,
                            across: int = across,
                        ) -> None:
                            self._copy_row(
                                source,
                                planes,
                                (here, stored),
                                to=to,
                                exists=exists,
                                remainder=across,
                            )

                        def clear(to: tirx.PrimExpr = to) -> None:
                            with b.serial(0, ceil_div(self.plan.distance, self.vectors.lanes)) as v:
                                self._clear(planes, to + v * self.vectors.lanes)

                        inside = [line >= 0, line < g.rows.source]
                        if g.sources % STEP:
                            inside.append(exists > 0)
                        elif g.rows.is_inside:
                            copy()
                            continue
                        b.either(tirx.all(*inside), copy, clear)

    def _clear(self, planes: tirx.Buffer, at: tirx.PrimExpr) -> None:
        self.vectors.store(planes, at, self.vectors.splat(0))

    def _copy_row(
        self,
        source: Half,
        planes: tirx.Buffer,
        place: tuple,
        to: tirx.PrimExpr,
        exists: tirx.PrimExpr,
        remainder: int,
    ) -> None:
        """Emit the copy of a row of two channels as pairs, with its padding.

        What a vector writes beyond a row is overwritten by the next one.
        """
        (here, stored), axis, lanes = place, self.g.columns, self.vectors.lanes
        begin, end = self.columns.inside(remainder, self.plan.distance)
        for first, last in ((0, begin), (end, self.plan.distance)):
            for at in range(first, last, lanes):
                self._clear(planes, to + at)
        if begin == end:
            return
        step = axis.step * axis.apart
        element = (begin + self.columns.floors[0]) * axis.step + remainder
        start = bind(here + element * axis.apart)

        def pairs(k: tirx.PrimExpr, number: Extent | None, is_single: bool) -> tirx.PrimExpr:
            first = self._elements(source, start + k * step, step, number)
            if is_single:
                return joined(first, _zeros(lanes))
            return joined(first, self._elements(source, start + stored + k * step, step, number))

        def copy(is_single: bool) -> None:
            self.vectors.each(
                end - begin,
                lambda k, number: self.vectors.store(
                    planes, to + begin + k, pairs(k, number, is_single)
                ),
            )

        if self.g.sources % 2:
            b.either(exists > 1, lambda: copy(False), lambda: copy(True))
        else:
            copy(False)

    def _elements(
        self, source: Half, at: tirx.PrimExpr, step: int, number: int | None
    ) -> tirx.PrimExpr:
        """Return the bits of elements of a row that are a step apart: all lanes, or the first
        ``number`` of them."""
        lanes = self.vectors.lanes
        at = bind(at)
        if step == 1:
            return bits_of(source, at, lanes, number)
        row = b.scratch(lanes, "uint16")
        own = tirx.Ramp(const(0), const(1), lanes)
        if number is not None:
            b.store(row, own, _zeros(lanes))
        with b.serial(0, lanes if number is None else number) as i:
            b.store(row, i, elements_of(source, at + i * step))
        return row[own]

    # Products

    def _image(
        self,
        planes: tirx.Buffer,
        tiles: tirx.Buffer,
        target: Tensor,
        image: Images,
        rows: tuple,
        blocks: tuple,
    ) -> None:
        """Emit the sums of some rows of an image, for some blocks of target channels."""
        g, (first, lines) = self.g, rows
        size = g.rows.target * g.columns.target
        index = bind(image.first % g.slices.target)
        sums = amx.scratch(self.plan.kept)
        pixels = bind((lines - 1) * self.plan.distance + self.plan.count)
        # Neighbouring pixels of all channels read the same elements of the planes.
        with b.serial(0, len(g.rows.phases)) as phase:
            down = g.rows.taps(phase)
            with b.serial(0, ceil_div(pixels, amx.COLUMNS)) as tile:
                pixel = bind(tile * amx.COLUMNS)
                wide = bind(tirx.Select(pixels - pixel > amx.LANES, const(2), const(1)))
                with b.serial(*blocks) as block:
                    v = bind(block * self.plan.height)
                    channels = bind(tirx.min(const(self.plan.height), g.targets - v))
                    channel = bind(image.volume * g.targets + v)
                    plane = bind((channel * g.slices.target + index) * size)
                    to = _Target(target, plane, first, lines, phase)
                    at = bind(
                        (image.volume % g.groups * self.plan.blocks + block) * self.plan.weights
                    )
                    tall = bind(tirx.Select(channels > amx.ROWS // 2, const(amx.ROWS), const(16)))
                    shape = (tall if self.plan.height > 16 else const(16)), wide
                    factors = planes, (tiles, at), image
                    self._columns(
                        factors, sums, pixel, down=down, shape=shape, channels=channels, to=to
                    )

    def _columns(
        self,
        factors: tuple,
        sums: tirx.Buffer,
        pixel: tirx.PrimExpr,
        down: Taps,
        shape: tuple,
        channels: tirx.PrimExpr,
        to: _Target,
    ) -> None:
        """Emit the sums of a tile for each phase of the columns."""
        with b.serial(0, len(self.g.columns.phases)) as phase:
            start = bind(phase * amx.SIZE) if self.plan.kept > 1 else const(0)
            across = self.g.columns.taps(phase)
            self._sum(factors, (sums, start), pixel, down=down, across=across, shape=shape)
            if self.plan.kept == 1:
                self._store(sums, pixel, channels, to, phase)
        if self.plan.kept > 1:
            self._store(sums, pixel, channels, to, None)

    def _sum(
        self,
        factors: tuple,
        sums: tuple,
        pixel: tirx.PrimExpr,
        down: Taps,
        across: Taps,
        shape: tuple,
    ) -> None:
        """Emit the sum over all taps of a phase."""
        (planes, (tiles, at), image), (buffer, start), (rows, wide) = factors, sums, shape
        each = self.plan.steps * amx.STEPS * self.plan.plane
        amx.clear(buffer, rows, start)

        def of_slice(tap: tirx.PrimExpr) -> None:
            first = bind((image.taps.first + tap * image.taps.step) * self.g.taps)
            with b.serial(0, down.number) as i, b.serial(0, across.number) as j:
                line = first + (down.first + i * down.step) * self.g.kernel[2]
                weight = line + across.first + j * across.step
                (row, y), (column, x) = self.rows.place(down, i), self.columns.place(across, j)
                number = row * len(self.columns.remainders) + column
                place = tap * self.plan.slice + number * each + y * self.plan.distance + x + pixel
                amx.add(
                    buffer,
                    (
                        tiles,
                        bind(at + weight * (self.plan.height * self.plan.pitch)),
                        2 * self.plan.pitch,
                    ),
                    (planes, bind(place), 4 * self.plan.plane),
                    steps=self.plan.steps,
                    rows=rows,
                    vectors=wide,
                    start=start,
                )

        image.each_tap(self.g.slices, of_slice)
        amx.store(buffer, rows, start)

    def _store(
        self,
        sums: tirx.Buffer,
        pixel: tirx.PrimExpr,
        channels: tirx.PrimExpr,
        to: _Target,
        phase: tirx.PrimExpr | None,
    ) -> None:
        """Emit the store of the pixels of a tile, which may be on several rows, of one phase of the
        columns, or of both."""
        g, distance, width = self.g, self.plan.distance, self.g.columns.target
        rows, size = len(g.rows.phases), g.slices.target * g.rows.target * width
        first = b.quotient(pixel, distance)
        biases = biases_from(to.buffer, to.start)
        last = bind(tirx.min(b.quotient(pixel + (amx.COLUMNS - 1), distance) + 1, to.lines))
        with b.serial(first, last) as line:
            row = bind((to.row + line) * rows + to.phase)
            begin = bind(tirx.max(pixel - line * distance, const(0)))
            most = tirx.min(const(self.plan.count), pixel + amx.COLUMNS - line * distance)
            number = bind(
                tirx.max(tirx.Select(row < g.rows.target, most, const(0)) - begin, const(0))
            )
            source = bind(line * distance + begin - pixel)
            with b.serial(0, channels) as c:
                here = bind(source + c * amx.COLUMNS)
                out = bind(to.start + c * size + row * width)
                place = to.buffer, out, biases(c)
                if phase is None:
                    self._store_both(sums, here, place, begin, number)
                elif len(g.columns.phases) == 1:
                    self._store_row(sums, here, place, begin, number)
                else:
                    self._store_apart(sums, here, place, (begin, number), phase)

    def _store_row(
        self, sums: tirx.Buffer, here: tirx.PrimExpr, place: tuple, begin: int, number: Extent
    ) -> None:
        """Emit the store of a row of the only phase."""
        target, out, bias = place
        out = bind(out + begin)
        self.vectors.each(
            number,
            lambda k, left: self.vectors.store(
                target, out + k, bind(self.vectors.load(sums, here + k)), left, bias
            ),
        )

    def _store_both(
        self, sums: tirx.Buffer, here: tirx.PrimExpr, place: tuple, begin: int, number: Extent
    ) -> None:
        """Emit the store of a row of two phases, whose elements alternate."""
        (target, out, bias), width = place, self.g.columns.target
        lanes = self.vectors.lanes
        with b.serial(0, ceil_div(number, lanes)) as i:
            k = bind(i * lanes)
            column = bind(2 * (begin + k))
            left = bind(tirx.min(2 * (number - k), width - column))
            parts = [bind(self.vectors.load(sums, here + k + phase * amx.SIZE)) for phase in (0, 1)]
            for j, vector in enumerate(interleaved(parts[0], parts[1], lanes)):
                exists = bind(tirx.max(const(0), tirx.min(const(lanes), left - j * lanes)))
                with b.when(exists > 0):
                    at = bind(out + column + j * lanes)
                    self.vectors.store(target, at, vector, exists, bias)

    def _store_apart(
        self,
        sums: tirx.Buffer,
        here: tirx.PrimExpr,
        place: tuple,
        columns: tuple,
        phase: tirx.PrimExpr,
    ) -> None:
        """Emit the store of a row of one of several phases."""
        (target, out, bias), (begin, number) = place, columns
        phases = len(self.g.columns.phases)
        with b.serial(0, number) as k:
            column = bind((begin + k) * phases + phase)
            with b.when(column < self.g.columns.target):
                b.store(target, bind(out + column), sums[here + k], bias)


def _zeros(lanes: int) -> tirx.PrimExpr:
    return tirx.Broadcast(tirx.const(0, "uint16"), lanes)
