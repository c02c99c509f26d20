"""Two-dimensional convolutions and their data gradients, NCHW with weights OIHW.

Both are one computation: an element of the target is a sum over taps of the kernel, and the source element
that a tap reads moves by a fixed step from one target element to the next. With a stride, that holds for
the data gradient among the target elements of one phase, those whose position leaves the same remainder
(:class:`Axis`): each phase has taps of its own, and no zeros are put between the elements of the source.

The lanes of a vector are channels of the target. The weight is packed into panels ``[tap][source
channel][channels of a panel]``, the part of the source that a task needs is copied to ``[row][channel][column]``
with its padding, and a tile of pixels is summed in registers: each step loads the vectors of a panel's row,
and broadcasts one element of the source for every pixel. Tiles are kept channels last until their block is
complete, and transposed in registers on the way out. The blocking follows Georganas et al., "Anatomy of
High-Performance Deep Learning Convolutions on SIMD Architectures" (2018).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd, prod

from tvm import tirx

from ..target import CPU
from . import _builder as b
from ._builder import Accumulators, Extent, Vectors, bind, ceil_div, const

#: Bytes of the source that a task copies, about a third of a second-level cache.
_SOURCE_BYTES = 320 * 1024

#: Bytes of the target that a task sums up channels last.
_TARGET_BYTES = 96 * 1024

#: Bytes of a panel that tiles go through before the next source channels.
_PANEL_BYTES = 48 * 1024

#: Bytes of weights that stay in a second-level cache from one image to the next.
_WEIGHT_BYTES = 512 * 1024


@dataclass(frozen=True)
class Conv2d:
    """A convolution. The batch may be symbolic (int32).

    Attributes
    ----------
    batch : int or tirx.PrimExpr
        The number of images.
    in_channels, out_channels : int
        The channels of data and result.
    size, kernel, strides, dilation : tuple[int, int]
        Extents of data and weight, steps of windows and taps: for rows, then for columns.
    padding : tuple[int, int, int, int]
        Zeros before the rows and the columns, then those after.
    groups : int
        The number of groups of channels.
    """

    batch: Extent
    in_channels: int
    out_channels: int
    size: tuple[int, int]
    kernel: tuple[int, int]
    strides: tuple[int, int] = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1

    @property
    def out_size(self) -> tuple[int, int]:
        """Return how many rows and columns of windows there are."""
        return tuple(
            (self.size[i] + self.padding[i] + self.padding[i + 2] - self._reach(i))
            // self.strides[i]
            + 1
            for i in (0, 1)
        )

    @property
    def data_shape(self) -> tuple[Extent, ...]:
        return (self.batch, self.in_channels, *self.size)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return (self.out_channels, self.in_channels // self.groups, *self.kernel)

    @property
    def out_shape(self) -> tuple[Extent, ...]:
        return (self.batch, self.out_channels, *self.out_size)

    def along(self, i: int) -> tuple[int, int, int, int]:
        """Return extent of the kernel, stride, padding before and dilation along an axis."""
        return self.kernel[i], self.strides[i], self.padding[i], self.dilation[i]

    def _reach(self, i: int) -> int:
        return (self.kernel[i] - 1) * self.dilation[i] + 1


def conv2d(
    conv: Conv2d, cpu: CPU, shapes: Sequence[Sequence[Extent]] | None = None
) -> tirx.PrimFunc:
    """Return the function of data, weight and result (float32) that computes a convolution.

    Parameters
    ----------
    conv : Conv2d
        The convolution. Its windows and channels are at least one.
    cpu : CPU
        What the function is for.
    shapes : Sequence, optional
        The shapes of the parameters, where they are not those of ``conv``.
    """
    axes = [Axis.forward(conv.out_size[i], conv.size[i], *conv.along(i)) for i in (0, 1)]
    gathering = _Gathering(
        conv.batch,
        conv.groups,
        conv.in_channels // conv.groups,
        conv.out_channels // conv.groups,
        axes,
        conv.kernel,
        source_major=False,
    )
    shapes = shapes or (conv.data_shape, conv.weight_shape, conv.out_shape)
    return _function("conv2d", ("data", "weight", "result"), shapes, gathering, cpu)


def conv2d_backward_data(
    conv: Conv2d, cpu: CPU, shapes: Sequence[Sequence[Extent]] | None = None
) -> tirx.PrimFunc:
    """Return the function of output gradient, weight and data gradient (float32) of a convolution.

    Parameters
    ----------
    conv, cpu, shapes
        As for :func:`conv2d`.
    """
    axes = [Axis.backward(conv.size[i], conv.out_size[i], *conv.along(i)) for i in (0, 1)]
    gathering = _Gathering(
        conv.batch,
        conv.groups,
        conv.out_channels // conv.groups,
        conv.in_channels // conv.groups,
        axes,
        conv.kernel,
        source_major=True,
    )
    shapes = shapes or (conv.out_shape, conv.weight_shape, conv.data_shape)
    names = ("output_grad", "weight", "data_grad")
    return _function("conv2d_backward_data", names, shapes, gathering, cpu)


def _function(name, names, shapes, gathering: _Gathering, cpu: CPU) -> tirx.PrimFunc:
    params = [(each, shape, "float32") for each, shape in zip(names, shapes, strict=True)]
    return b.prim_func(name, params, _Generator(gathering, cpu).emit)


@dataclass(frozen=True)
class Taps:
    """The taps of one phase: tap ``first + j * step`` reads at ``offset + j * move``, for j below ``number``."""

    number: int
    first: int
    step: int
    offset: int
    move: int

    @property
    def offsets(self) -> list[int]:
        return [self.offset + j * self.move for j in range(self.number)]


@dataclass(frozen=True)
class Axis:
    """A spatial axis: what taps the elements of the target have, and what they read.

    Element ``i * len(phases) + phase`` of the target reads element ``i * step + offset`` of the source for each
    offset of the phase's taps; there are zeros outside of the source.

    Attributes
    ----------
    target, source : int
        The extents.
    step : int
        What the source moves by from one target element of a phase to the next.
    phases : tuple[Taps, ...]
        The taps of each phase.
    """

    target: int
    source: int
    step: int
    phases: tuple[Taps, ...]

    @staticmethod
    def forward(windows, size, kernel, stride, before, dilation) -> Axis:
        """Return the axis of a convolution: window i reads ``i * stride + tap * dilation - before``."""
        return Axis(windows, size, stride, (Taps(kernel, 0, 1, -before, dilation),))

    @staticmethod
    def backward(size, windows, kernel, stride, before, dilation) -> Axis:
        """Return the axis of a data gradient: element i reads ``(i + before - tap * dilation) / stride``."""
        step = stride // gcd(stride, dilation)
        move = -dilation // gcd(stride, dilation)
        phases = []
        for phase in range(stride):
            at = phase + before
            taps = [tap for tap in range(kernel) if (at - tap * dilation) % stride == 0]
            first = taps[0] if taps else 0
            phases.append(Taps(len(taps), first, step, (at - first * dilation) // stride, move))
        return Axis(size, windows, 1, tuple(phases))

    @cached_property
    def offsets(self) -> tuple[int, int]:
        """Return the first and the last offset of all taps."""
        offsets = [offset for taps in self.phases for offset in taps.offsets]
        return min(offsets), max(offsets)

    def count(self, phase: int = 0) -> int:
        """Return how many elements of the target a phase has."""
        return max(0, ceil_div(self.target - phase, len(self.phases)))

    def extent(self, count: int) -> int:
        """Return how many elements of the source this many elements of a phase reach over."""
        return (count - 1) * self.step + self.offsets[1] - self.offsets[0] + 1

    @property
    def is_inside(self) -> bool:
        """Whether nothing outside of the source is read."""
        return self.offsets[0] >= 0 and self.offsets[0] + self.extent(self.count()) <= self.source


@dataclass(frozen=True)
class _Gathering:
    """What is computed, per group: ``target[v] = sum over source channel r and tap of source[r] weight[v, r]``.

    The weight is ``[v, r, tap]``, or ``[r, v, tap]`` where ``source_major``.
    """

    batch: Extent
    groups: int
    sources: int
    targets: int
    axes: list[Axis]
    kernel: tuple[int, int]
    source_major: bool

    @property
    def images(self) -> Extent:
        """Return the number of images, those of each group of channels counted alone."""
        return self.batch * self.groups

    @property
    def taps(self) -> int:
        return prod(self.kernel)


def tile(cpu: CPU) -> tuple[int, int]:
    """Return pixels and vectors of the largest tile that fits the registers."""
    return (14, 2) if cpu.registers >= 32 else (6, 2)


class _Generator:
    def __init__(self, gathering: _Gathering, cpu: CPU):
        self.g, self.cpu = gathering, cpu
        self.rows, self.columns = gathering.axes
        self.vectors = Vectors(cpu.lanes)
        self.pixels, self.tile_vectors = tile(cpu)
        self.tile_vectors = min(self.tile_vectors, ceil_div(gathering.targets, cpu.lanes))
        self.width = self.tile_vectors * cpu.lanes
        self.panels = ceil_div(gathering.targets, self.width)
        self.depth = self._depth()
        self.depths = ceil_div(gathering.sources, self.depth)
        # The next stretch of the weight is asked for where it has left the cache since the last image.
        weights = gathering.groups * self.panels * gathering.sources * gathering.taps * self.width
        self.is_streamed = 4 * weights > _WEIGHT_BYTES
        self.is_inside = self.rows.is_inside and self.columns.is_inside
        # Planes so many bytes apart would share few sets of a cache.
        self.is_packed = not self.is_inside or prod(axis.source for axis in self.g.axes) % 256 == 0
        self.pitch = self.columns.extent(self.columns.count())
        self.block_rows, self.block_images = self._blocks()
        self.row_blocks = ceil_div(self.rows.count(), self.block_rows)
        self.image_blocks = ceil_div(gathering.images, self.block_images)
        self.task_panels = self._task_panels()

    # Sizes

    def _depth(self) -> int:
        """Return how many source channels a tile sums over at once."""
        fitting = max(1, _PANEL_BYTES // (4 * self.width * self.g.taps))
        return ceil_div(self.g.sources, ceil_div(self.g.sources, fitting))

    def _blocks(self) -> tuple[int, int]:
        """Return how many rows (of a phase) and images a task has."""
        phases, count = len(self.rows.phases), self.rows.count()
        pixels = phases * self.columns.target

        def fits(rows: int, images: int) -> bool:
            source = self.rows.extent(rows) * self.pitch * self.g.sources * 4
            target = rows * pixels * self.width * 4
            return source * images <= _SOURCE_BYTES and target * images <= _TARGET_BYTES

        rows = next((n for n in range(count, 1, -1) if fits(n, 1)), 1)
        rows = ceil_div(count, ceil_div(count, rows))
        images = 1
        if rows == count and self.g.groups == 1:
            most = self.g.images // self.cpu.cores if isinstance(self.g.images, int) else 4
            while images * 2 <= most and fits(rows, images * 2):
                images *= 2
        return rows, images

    def _task_panels(self) -> int:
        """Return how many panels a task has."""
        if isinstance(self.image_blocks, int):
            blocks = self.image_blocks * self.row_blocks
        else:
            blocks = self.row_blocks
        wanted = ceil_div(4 * self.cpu.cores, blocks)
        return ceil_div(self.panels, min(self.panels, wanted))

    # Emitting

    def emit(self, source, weight, target) -> None:
        """Emit the packing of the weight, and the tasks: some panels for some rows of some images."""
        g = self.g
        panels = b.scratch(g.groups * self.panels * g.sources * g.taps * self.width)
        self._pack_weight(weight, panels)
        blocks = bind_extent(self.image_blocks * self.row_blocks)
        parts = ceil_div(self.panels, self.task_panels)
        with b.parallel(0, parts * blocks) as task:
            block = bind(task % blocks)
            panel = bind((task // blocks) * self.task_panels)
            image = bind((block // self.row_blocks) * self.block_images)
            row = bind((block % self.row_blocks) * self.block_rows)
            images = self._at_most(self.block_images, g.images, image)
            self._task(source, panels, target, (image, images), row, panel)

    def _at_most(self, size: int, extent: Extent, start):
        """Return how many of a block are left."""
        if size == 1 or (isinstance(extent, int) and extent % size == 0):
            return const(size)
        return bind(tirx.min(const(size), extent - start))

    def _task(self, source, panels, target, images, row, panel) -> None:
        phases = len(self.rows.phases)
        image, number = images
        lines = self._at_most(self.block_rows, self.rows.count(), row)
        height = self._at_most(self.block_rows * phases, self.rows.target, row * phases)
        view = self._view(source, images, row, lines)
        size = self.block_rows * phases * self.columns.target * self.width
        sums = b.scratch(self.block_images * size)
        last = bind(tirx.min(panel + self.task_panels, const(self.panels)))
        with b.serial(panel, last) as j:

            def one(vectors: int, channels: int | None) -> None:
                with b.serial(0, number * (size // self.vectors.lanes)) as i:
                    self.vectors.store(sums, i * self.vectors.lanes, self.vectors.splat(0))
                with b.serial(0, self.depths) as k, b.serial(0, number) as i:
                    at = bind((image + i) % self.g.groups * self.panels + j)
                    first, depth = self._stretch(k)
                    start = bind((at * self.g.sources + first) * (self.g.taps * self.width))
                    part = _Part(panels, start, first, depth, vectors)
                    self._rows(view.of_image(i), part, sums, i * size, lines, height)
                with b.serial(0, number) as i:
                    channel = (image + i) * self.g.targets + j * self.width
                    plane = self.rows.target * self.columns.target
                    out = bind(channel * plane + row * (phases * self.columns.target))
                    self._finish(sums, i * size, target, out, height, channels)

            self._whole_or_part(j, one)

    def _whole_or_part(self, j, emit: Callable) -> None:
        """Emit a whole panel, and the last one with as many vectors as its channels need."""
        rest = self.g.targets % self.width
        if rest == 0:
            emit(self.tile_vectors, None)
            return
        part = (ceil_div(rest, self.vectors.lanes), rest)
        if self.panels == 1:
            emit(*part)
        else:
            b.either(
                j < self.panels - 1, lambda: emit(self.tile_vectors, None), lambda: emit(*part)
            )

    def _stretch(self, k):
        """Return first and number of the source channels of a stretch."""
        first = bind(k * self.depth)
        return first, self._at_most(self.depth, self.g.sources, first)

    # Packing

    def _pack_weight(self, weight, panels) -> None:
        """Copy the weight to ``[group][panel][stretch][tap][source channel][width]``, padded with zeros."""
        g, lanes = self.g, self.vectors.lanes
        with b.parallel(0, g.groups * self.panels * self.depths) as task:
            panel = bind(task // self.depths)
            first, depth = self._stretch(task % self.depths)
            start = bind((panel * g.sources + first) * (g.taps * self.width))
            group, j = bind(panel // self.panels), bind(panel % self.panels)
            base = bind(group * (g.targets * g.sources * g.taps))
            with b.serial(0, self.tile_vectors) as v:
                channel = bind(j * self.width + v * lanes)
                left = bind(tirx.max(const(0), tirx.min(const(lanes), g.targets - channel)))
                out = bind(start + v * lanes)
                if g.source_major:
                    with b.serial(0, depth) as r:
                        at = bind(base + ((first + r) * g.targets + channel) * g.taps)

                        def place(tap, out=out, r=r):
                            return out + (tap * depth + r) * self.width

                        self._transposed(weight, at, g.taps, left, g.taps, panels, place)
                else:
                    at = bind(base + (channel * g.sources + first) * g.taps)
                    step = g.sources * g.taps

                    def place(i, out=out):
                        return out + ((i % g.taps) * depth + i // g.taps) * self.width

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

    def _view(self, source, images, row, lines) -> _View:
        """Return where the source is read: in place, or from a copy of the block with its padding."""
        g, (image, number) = self.g, images
        plane = self.rows.source * self.columns.source
        if not self.is_packed:
            line = bind(image * (g.sources * plane) + row * (self.rows.step * self.columns.source))
            start = line + self.rows.offsets[0] * self.columns.source + self.columns.offsets[0]
            return _View(source, start, g.sources * plane, self.columns.source, plane)
        heights = self.rows.extent(self.block_rows)
        line = g.sources * self.pitch
        copy = b.scratch(self.block_images * heights * line + self.vectors.lanes)
        needed = bind((lines - 1) * self.rows.step + self.rows.extent(1))
        first = bind(row * self.rows.step + self.rows.offsets[0])
        with b.serial(0, number) as i, b.serial(0, needed) as y:
            out = bind((i * heights + y) * line)
            at = bind(first + y)
            start = bind(((image + i) * g.sources * self.rows.source + at) * self.columns.source)

            def inside(start=start, out=out) -> None:
                with b.serial(0, g.sources) as r:
                    self._pack_line(source, start + r * plane, copy, bind(out + r * self.pitch))

            b.either(
                tirx.all(at >= 0, at < self.rows.source),
                inside,
                lambda out=out: self.vectors.each(
                    line,
                    lambda i, left: self.vectors.store(copy, out + i, self.vectors.splat(0), left),
                ),
            )
        return _View(copy, const(0), heights * line, line, self.pitch)

    def _pack_line(self, source, start, copy, out) -> None:
        """Copy a line of the source, with the zeros before and after it that are read."""
        offset = self.columns.offsets[0]
        before, skipped = max(0, -offset), max(0, offset)
        extent = max(0, min(self.columns.source - skipped, self.pitch - before))
        zeros = self.vectors.splat(0)

        def fill(begin: int, end: int) -> None:
            for i in range(begin, end, self.vectors.lanes):
                self.vectors.store(copy, out + i, zeros, end - i)

        fill(0, min(before, self.pitch))
        self.vectors.each(
            extent,
            lambda i, left: self.vectors.store(
                copy, out + before + i, self.vectors.load(source, start + skipped + i, left), left
            ),
        )
        fill(min(before, self.pitch) + extent, self.pitch)

    # Summing

    def _rows(self, view: _View, part: _Part, sums, start, lines, height) -> None:
        """Emit the tiles of all rows of a block."""
        phases = self.rows.phases
        if len(phases) == 1:
            self._phase_rows(view, part, sums, start, lines, phases[0])
            return
        with b.serial(0, len(phases)) as phase:
            taps = [
                _table([getattr(each, name) for each in phases], phase)
                for name in ("number", "first", "offset")
            ]
            number, first, offset = (bind(each) for each in taps)
            taps = Taps(number, first, phases[0].step, offset, phases[0].move)
            with b.serial(0, lines) as i:
                line = bind(i * len(phases) + phase)
                with b.when(line < height):
                    self._line(view, part, sums, start, i, line, taps, 1)

    def _phase_rows(self, view, part, sums, start, lines, taps) -> None:
        together = self._rows_together()
        if together > 1:
            with b.serial(0, lines // together) as i:
                line = bind(i * together)
                self._line(view, part, sums, start, line, line, taps, together)
            with b.serial(0, lines % together) as i:
                line = bind(lines // together * together + i)
                self._line(view, part, sums, start, line, line, taps, 1)
            return
        with b.serial(0, lines) as i:
            self._line(view, part, sums, start, i, i, taps, 1)

    def _rows_together(self) -> int:
        """Return how many rows a tile has: more than one where rows are short."""
        count = self.columns.count()
        if len(self.columns.phases) > 1 or 2 * count > self.pixels:
            return 1
        return min(self.pixels // count, self.block_rows)

    def _line(self, view, part, sums, start, i, line, taps, together) -> None:
        """Emit the tiles of a row, or of rows together, phase by phase of the columns."""
        x = bind(view.start + (i * self.rows.step + taps.offset - self.rows.offsets[0]) * view.line)
        out = bind(start + line * (self.columns.target * self.width))
        for phase, across in enumerate(self.columns.phases):
            count = self.columns.count(phase)
            if count == 0 or across.number == 0:
                continue
            pixels = ceil_div(count, ceil_div(count, self.pixels))
            at = x + (across.offset - self.columns.offsets[0])

            def tiles(first, size, at=at, across=across, phase=phase) -> None:
                step = len(self.columns.phases)
                spread = [
                    (
                        row * self.rows.step * view.line + column * self.columns.step,
                        (row * self.columns.target + column * step) * self.width,
                    )
                    for row in range(together)
                    for column in range(size)
                ]
                place = bind(out + (first * step + phase) * self.width)
                read = bind(at + first * self.columns.step)
                self._tile(view, read, part, sums, place, spread, (taps, across))

            whole, rest = divmod(count, pixels)
            if whole > 1:
                with b.serial(0, whole) as j:
                    tiles(bind(j * pixels), pixels)
            else:
                tiles(const(0), pixels)
            if rest:
                tiles(const(whole * pixels), rest)

    def _tile(self, view, read, part, sums, place, spread, taps) -> None:
        """Emit what one tile adds to its sums."""
        down, across = taps
        lanes, vectors = self.vectors.lanes, part.vectors
        total = Accumulators(self.vectors, len(spread) * vectors)
        for i, (_, offset) in enumerate(spread):
            for v in range(vectors):
                total[i * vectors + v] = self.vectors.load(sums, place + offset + v * lanes)
        with b.serial(0, down.number) as p, b.serial(0, across.number) as q:
            tap = (down.first + p * down.step) * self.g.kernel[1] + across.first + q * across.step
            panel = bind(part.start + tap * part.depth * self.width)
            ahead = self.depth * self.g.taps * self.width
            x = bind(read + p * (down.move * view.line) + q * across.move + part.first * view.plane)
            with b.serial(0, part.depth) as r:
                row = [
                    bind(self.vectors.load(part.panels, panel + r * self.width + v * lanes))
                    for v in range(vectors)
                ]
                if self.is_streamed:
                    for v in range(vectors):
                        b.prefetch(part.panels, panel + ahead + r * self.width + v * lanes)
                for i, (offset, _) in enumerate(spread):
                    value = bind(self.vectors.splat(view.buffer[x + r * view.plane + offset]))
                    for v in range(vectors):
                        total[i * vectors + v] = total[i * vectors + v] + value * row[v]
        for i, (_, offset) in enumerate(spread):
            for v in range(vectors):
                self.vectors.store(sums, place + offset + v * lanes, total[i * vectors + v])

    def _finish(self, sums, start, target, out, height, channels) -> None:
        """Transpose the sums of a block to where they belong; ``channels`` are those of a panel in part."""
        lanes = self.vectors.lanes
        plane = self.rows.target * self.columns.target
        with b.serial(0, ceil_div(channels or self.width, lanes)) as v:

            def square(i, number) -> None:
                rows = [
                    bind(self.vectors.load(sums, start + (i + p) * self.width + v * lanes))
                    for p in range(lanes if not isinstance(number, int) else number)
                ]
                rows += [self.vectors.splat(0)] * (lanes - len(rows))
                for c, vector in enumerate(self.vectors.transpose(rows)):
                    at = out + (v * lanes + c) * plane + i
                    if channels is None or c < channels % lanes or channels % lanes == 0:
                        self.vectors.store(target, at, vector, number)
                    elif channels > lanes:
                        with b.when(v < channels // lanes):
                            self.vectors.store(target, at, vector, number)

            extent = height * self.columns.target
            self.vectors.each(int(extent) if isinstance(extent, tirx.IntImm) else extent, square)


@dataclass(frozen=True)
class _View:
    """Where the source of a block is: the distances of its images, lines and planes in a buffer."""

    buffer: tirx.Buffer
    start: tirx.PrimExpr
    image: int
    line: int
    plane: int

    def of_image(self, i) -> _View:
        return _View(self.buffer, bind(self.start + i * self.image), 0, self.line, self.plane)


@dataclass(frozen=True)
class _Part:
    """A stretch of a panel: where it starts, its first source channel and their number, its vectors."""

    panels: tirx.Buffer
    start: tirx.PrimExpr
    first: tirx.PrimExpr
    depth: tirx.PrimExpr
    vectors: int


def bind_extent(extent: Extent):
    return const(extent) if isinstance(extent, int) else bind(extent)


def _table(values: Sequence[int], index):
    """Return the value at an index, as a chain of selections."""
    result = const(values[-1])
    for i in reversed(range(len(values) - 1)):
        if values[i:] != values[i : i + 1] * (len(values) - i):
            result = tirx.Select(tirx.EQ(index, const(i)), const(values[i]), result)
    return result
