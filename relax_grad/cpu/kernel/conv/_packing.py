"""Packing of weights and source images into the layouts that convolution kernels read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tvm import tirx

from ..language import builder as b
from ..language.builder import Extent, Vectors, bind, ceil_div, const
from ..language.halves import Tensor
from ..language.statements import Emit
from ._direct_plan import DirectPlan
from .gathering import Axis, Gathering, Taps


@dataclass(frozen=True)
class View:
    """The layout of a block's source in a buffer: start, and strides of slices, images, lines and
    channels."""

    buffer: tirx.Buffer
    start: tirx.PrimExpr
    slice: int
    image: int
    line: int
    channel: int

    def of_slice(self, tap: tirx.PrimExpr) -> View:
        """Return the view of the slice that a tap reads."""
        return replace(self, start=bind(self.start + tap * self.slice))


@dataclass(frozen=True)
class Images:
    """Consecutive images of the target, of one channel group; a single image if they are slices of
    volumes.

    Attributes
    ----------
    first : tirx.PrimExpr
        The first image, counted through all volumes.
    number : int or tirx.PrimExpr
        The number of images.
    volume : tirx.PrimExpr
        The volume that contains the first image.
    slice : tirx.PrimExpr
        The first slice of the source that it reads, which may be out of bounds.
    taps : Taps
        The slices of the weight.
    """

    first: tirx.PrimExpr
    number: Extent
    volume: tirx.PrimExpr
    slice: tirx.PrimExpr
    taps: Taps

    @staticmethod
    def of(gathering: Gathering, first: tirx.PrimExpr, number: tirx.PrimExpr) -> Images:
        """Return the images from ``first`` on, with the slices and taps that they read."""
        slices = gathering.slices
        volume, index = bind(first // slices.target), bind(first % slices.target)
        taps = slices.taps(index % len(slices.phases))
        start = bind(index // len(slices.phases) * slices.step + taps.offset)
        return Images(first, number, volume, start, taps)

    def each_tap(self, slices: Axis, emit: Emit) -> None:
        """Emit ``emit(tap)`` for each tap along the axis whose slice of the source is in bounds."""
        with b.serial(0, self.taps.number) as tap:
            at = bind(self.slice + tap * self.taps.move)
            if slices.is_inside:
                emit(tap)
            else:
                with b.when(tirx.all(at >= 0, at < slices.source)):
                    emit(tap)


def at_most(size: int, extent: Extent, start: tirx.PrimExpr) -> tirx.PrimExpr:
    """Return the number of elements of the block at ``start``, which the extent may cut off."""
    if size == 1 or (isinstance(extent, int) and extent % size == 0):
        return const(size)
    return bind(tirx.min(const(size), extent - start))


def stretch_of(plan: DirectPlan, k: tirx.PrimExpr) -> tuple[tirx.PrimExpr, tirx.PrimExpr]:
    """Return the first source channel of a stretch, and its number of source channels."""
    first = bind(k * plan.depth)
    return first, at_most(plan.depth, plan.gathering.sources, first)


class Packer:
    """A generator of the packing code.

    Parameters
    ----------
    plan : DirectPlan
        The plan of the convolution.
    """

    def __init__(self, plan: DirectPlan):
        self.s, self.g, self.vectors = plan, plan.gathering, Vectors(plan.lanes)
        #: The number of source channels in memory.
        self.channels = self.g.sources
        self.rows, self.columns = self.g.rows, self.g.columns

    def weight(self, weight: Tensor, panels: tirx.Buffer) -> None:
        """Copy the weight to ``[group][panel][slice][stretch][tap][source channel][width]``, padded
        with zeros."""
        g, lanes = self.g, self.vectors.lanes
        taps = g.kernel[0] * g.taps
        with b.parallel(0, g.groups * self.s.panels * self.s.depths) as task:
            panel = bind(task // self.s.depths)
            first, depth = stretch_of(self.s, task % self.s.depths)
            start = bind(
                panel * (g.kernel[0] * self.s.panel_slice) + first * (g.taps * self.s.width)
            )

            def place_of(
                tap: tirx.PrimExpr, r: tirx.PrimExpr, depth: tirx.PrimExpr = depth
            ) -> tirx.PrimExpr:
                """Return the offset of a tap of a source channel from the start of its stretch."""
                at = tap // g.taps * self.s.panel_slice
                return at + (tap % g.taps * depth + r) * self.s.width

            group, j = bind(panel // self.s.panels), bind(panel % self.s.panels)
            base = bind(group * (g.targets * self.channels * taps))
            with b.serial(0, self.s.tile_vectors) as v:
                channel = bind(j * self.s.width + v * lanes)
                left = bind(tirx.max(const(0), tirx.min(const(lanes), g.targets - channel)))
                out = bind(start + v * lanes)
                self._channels(
                    (weight, base, channel, left),
                    (first, depth),
                    panels,
                    lambda tap, r, out=out: out + place_of(tap, r),
                )

    def _channels(self, source: tuple, stretch: tuple, target: Tensor, place: Callable) -> None:
        """Copy a stretch of source channels for a vector of channels of the target.

        Parameters
        ----------
        source : tuple
            The weight, the offset of its group, the first channel of the target, and the number of
            channels of the vector that exist.
        stretch : tuple
            The first source channel, and the number of source channels.
        target : tirx.Buffer
            The buffer of the copy.
        place : Callable
            ``place(tap, r)`` returns the index of the vector of a tap of the r-th source channel.
        """
        (weight, base, channel, left), (first, depth), g = source, stretch, self.g
        taps = g.kernel[0] * g.taps
        is_image, of_tap = g.kernel[0] == 1, depth * self.s.width
        if g.source_major:
            with b.serial(0, depth) as r:
                at = bind(base + ((first + r) * g.targets + channel) * taps)
                self._transposed(
                    (weight, at, taps),
                    left,
                    taps,
                    target=target,
                    place=lambda tap: place(taps - 1 - tap, r),
                    strides=(const(0) - of_tap,) if is_image else (),
                )
        else:
            at = bind(base + (channel * self.channels + first) * taps)
            self._transposed(
                (weight, at, self.channels * taps),
                left,
                depth * taps,
                target=target,
                place=lambda i: place(i % taps, i // taps),
                strides=(self.s.width,)
                if taps == 1
                else (of_tap, taps, self.s.width)
                if is_image
                else (),
            )

    def _transposed(
        self,
        source: tuple[Tensor, tirx.PrimExpr, int],
        left: tirx.PrimExpr,
        extent: Extent,
        target: Tensor,
        place: Callable,
        strides: tuple[Extent, ...],
    ) -> None:
        """Copy ``lanes`` rows to columns; only the first ``left`` rows exist."""
        weight, start, step = source
        if isinstance(extent, int) and extent == 1 and step == 1:
            row = self.vectors.load(weight, start, left)
            self.vectors.store(target, place(const(0)), row)
        else:
            self.vectors.copy_transposed(source, left, extent, target, place, strides=strides)

    def source(
        self,
        source: Tensor,
        images: Images,
        row: tirx.PrimExpr,
        lines: tirx.PrimExpr,
        channels: tuple,
    ) -> View:
        """Return the view of the source to read: in place, or in a padded copy of the block.

        ``channels`` are the first channel to copy, and their number.
        """
        g, plane = self.g, self.g.plane
        move = images.taps.move * g.slices.apart * plane
        channel = g.slices.stored * plane
        volume = images.volume * (self.channels * channel)
        volume = bind(volume + images.slice * (g.slices.apart * plane))
        if not self.s.is_packed:
            line = bind(volume + row * (self.rows.step * self.columns.source))
            start = line + self.rows.offsets[0] * self.columns.source + self.columns.offsets[0]
            return View(
                source,
                start,
                move,
                image=self.channels * channel,
                line=self.columns.source,
                channel=channel,
            )
        heights = self.rows.extent(self.s.block_rows)
        line = self.s.source_depth * self.s.pitch
        size = self.s.block_images * heights * line
        copy = b.scratch(max(phase.number for phase in g.slices.phases) * size + self.vectors.lanes)

        def pack(tap: tirx.PrimExpr) -> None:
            with b.serial(0, images.number) as i:
                start = bind(volume + tap * move + i * (self.channels * channel))
                self._pack_image(
                    (source, start),
                    (row, lines),
                    (copy, bind(tap * size + i * heights * line)),
                    channels,
                )

        images.each_tap(g.slices, pack)
        first, _ = channels
        start = bind(const(0) - first * self.s.pitch)
        return View(copy, start, size, image=heights * line, line=line, channel=self.s.pitch)

    def _pack_image(
        self,
        tensor: tuple[Tensor, tirx.PrimExpr],
        rows: tuple[tirx.PrimExpr, tirx.PrimExpr],
        place: tuple[tirx.Buffer, tirx.PrimExpr],
        channels: tuple[tirx.PrimExpr, int],
    ) -> None:
        """Copy the rows of some channels of an image that the given rows of the target read."""
        (source, image), (row, lines), (copy, to) = tensor, rows, place
        begin, number = channels
        line, channel = self.s.source_depth * self.s.pitch, self.g.slices.stored * self.g.plane
        needed = bind((lines - 1) * self.rows.step + self.rows.extent(1))
        first = bind(row * self.rows.step + self.rows.offsets[0])
        with b.serial(0, needed) as y:
            out = bind(to + y * line)
            at = bind(first + y)
            start = bind(image + at * (self.rows.apart * self.columns.stored))

            def inside(start: tirx.PrimExpr = start, out: tirx.PrimExpr = out) -> None:
                with b.serial(0, number) as r:
                    read = self._reader(source, start, channel, begin + r)
                    self._pack_line(read, copy, bind(out + r * self.s.pitch))

            def outside(out: tirx.PrimExpr = out) -> None:
                zero = self.vectors.splat
                self.vectors.each(
                    line, lambda i, left: self.vectors.store(copy, out + i, zero(0), left)
                )

            b.either(tirx.all(at >= 0, at < self.rows.source), inside, outside)

    def _reader(
        self, source: Tensor, start: tirx.PrimExpr, channel: int, r: tirx.PrimExpr
    ) -> Callable:
        """Return the reader of a line of the r-th source channel: ``read(i, number)`` is the vector
        from its i-th element on, with 0 in the lanes from ``number`` on."""
        return lambda i, number: self.vectors.load(source, start + r * channel + i, number)

    def _pack_line(self, read: Callable, copy: tirx.Buffer, out: tirx.PrimExpr) -> None:
        """Copy a line of the source, with the zeros of its padding on both sides."""
        offset = self.columns.offsets[0]
        before, skipped = max(0, -offset), max(0, offset)
        extent = max(0, min(self.columns.source - skipped, self.s.pitch - before))
        zeros = self.vectors.splat(0)

        def fill(begin: int, end: int) -> None:
            for i in range(begin, end, self.vectors.lanes):
                self.vectors.store(copy, out + i, zeros, end - i)

        fill(0, min(before, self.s.pitch))
        if self.columns.apart > 1:
            self._pack_every(read, extent, copy, out)
            return
        self.vectors.each(
            extent,
            lambda i, left: self.vectors.store(
                copy, out + before + i, read(skipped + i, left), left
            ),
        )
        fill(min(before, self.s.pitch) + extent, self.s.pitch)

    def _pack_every(
        self, read: Callable, extent: int, copy: tirx.Buffer, out: tirx.PrimExpr
    ) -> None:
        """Copy strided elements, all in bounds: as many at once as one vector load spans."""
        step = self.columns.apart
        size = min(extent, ceil_div(self.vectors.lanes, step))

        def some(i: tirx.PrimExpr, number: int) -> None:
            vector = read(i * step, (number - 1) * step + 1)
            self.vectors.store(copy, out + i, self.vectors.every(vector, step), number)

        with b.serial(0, extent // size) as i:
            some(bind(i * size), size)
        if extent % size:
            some(const(extent - extent % size), extent % size)
