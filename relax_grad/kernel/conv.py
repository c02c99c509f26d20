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

from tvm import tirx

from ..target import CPU
from . import _builder as b
from ._builder import Accumulators, Extent, bind, ceil_div, const
from ._conv_blocks import Blocking
from ._conv_pack import Packer, View
from ._convolution import Conv2d
from ._gathering import Gathering, Taps


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
    gathering = Gathering.forward(conv.flattened)
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
    gathering = Gathering.backward(conv.flattened)
    shapes = shapes or (conv.out_shape, conv.weight_shape, conv.data_shape)
    names = ("output_grad", "weight", "data_grad")
    return _function("conv2d_backward_data", names, shapes, gathering, cpu)


def _function(name, names, shapes, gathering: Gathering, cpu: CPU) -> tirx.PrimFunc:
    params = [(each, shape, "float32") for each, shape in zip(names, shapes, strict=True)]
    return b.prim_func(name, params, _Generator(gathering, cpu).emit)


class _Generator:
    def __init__(self, gathering: Gathering, cpu: CPU):
        self.g, self.s = gathering, Blocking(gathering, cpu)
        self.pack, self.vectors = Packer(self.s), self.s.vectors
        self.rows, self.columns = gathering.rows, gathering.columns

    def emit(self, source, weight, target) -> None:
        """Emit the packing of the weight, and the tasks: some panels for some rows of some images."""
        g = self.g
        panels = b.scratch(g.groups * self.s.panels * g.sources * g.taps * self.s.width)
        self.pack.weight(weight, panels)
        blocks = bind(const(1) * self.s.image_blocks * self.s.row_blocks)
        parts = ceil_div(self.s.panels, self.s.task_panels)
        with b.parallel(0, parts * blocks) as task:
            block = bind(task % blocks)
            panel = bind((task // blocks) * self.s.task_panels)
            image = bind((block // self.s.row_blocks) * self.s.block_images)
            row = bind((block % self.s.row_blocks) * self.s.block_rows)
            images = self.s.at_most(self.s.block_images, g.images, image)
            self._task(source, panels, target, (image, images), row, panel)

    def _task(self, source, panels, target, images, row, panel) -> None:
        phases = len(self.rows.phases)
        image, number = images
        lines = self.s.at_most(self.s.block_rows, self.rows.count(), row)
        height = self.s.at_most(self.s.block_rows * phases, self.rows.target, row * phases)
        view = self.pack.source(source, images, row, lines)
        size = self.s.block_rows * phases * self.columns.target * self.s.width
        sums = b.scratch(self.s.block_images * size)
        block = _Block(view, sums, size, row, lines, height)
        last = bind(tirx.min(panel + self.s.task_panels, const(self.s.panels)))
        with b.serial(panel, last) as j:

            def one(vectors: int, channels: int | None) -> None:
                with b.serial(0, number * (size // self.vectors.lanes)) as i:
                    self.vectors.store(sums, i * self.vectors.lanes, self.vectors.splat(0))
                with b.serial(0, self.s.depths) as k:
                    first, depth = self.s.stretch(k)
                    at = bind(image % self.g.groups * self.s.panels + j)
                    start = bind((at * self.g.sources + first) * (self.g.taps * self.s.width))
                    self._images(block, _Part(panels, start, first, depth, vectors), number)
                with b.serial(0, number) as i:
                    channel = (image + i) * self.g.targets + j * self.s.width
                    plane = self.rows.target * self.columns.target
                    out = bind(channel * plane + row * (phases * self.columns.target))
                    self._finish(sums, i * size, target, out, height, channels)

            self._whole_or_part(j, one)

    def _whole_or_part(self, j, emit: Callable) -> None:
        """Emit a whole panel, and the last one with as many vectors as its channels need."""
        rest = self.g.targets % self.s.width
        if rest == 0:
            emit(self.s.tile_vectors, None)
            return
        part = (ceil_div(rest, self.vectors.lanes), rest)
        if self.s.panels == 1:
            emit(*part)
        else:
            b.either(
                j < self.s.panels - 1, lambda: emit(self.s.tile_vectors, None), lambda: emit(*part)
            )

    def _images(self, block: _Block, part: _Part, number) -> None:
        """Emit what a stretch of a panel adds to the images of a block, some of which share their tiles."""
        together = self.s.tile_images
        if together > 1:
            with b.serial(0, number // together) as i:
                self._rows(block, part, i * together, together)
            with b.serial(0, number % together) as i:
                self._rows(block, part, number // together * together + i, 1)
        else:
            with b.serial(0, number) as i:
                self._rows(block, part, i, 1)

    def _rows(self, block: _Block, part: _Part, image, together: int) -> None:
        """Emit the rows of an image, or of images together, phase by phase."""
        phases = self.rows.phases
        image = bind(image)
        if len(phases) == 1:
            with b.serial(0, block.lines) as i:
                self._line(block, part, (image, together), i, i, phases[0])
            return
        with b.serial(0, len(phases)) as phase:
            number, first, offset = (
                bind(_table([getattr(each, name) for each in phases], phase))
                for name in ("number", "first", "offset")
            )
            taps = Taps(number, first, phases[0].step, offset, phases[0].move)
            with b.serial(0, block.lines) as i:
                line = bind(i * len(phases) + phase)
                with b.when(line < block.height):
                    self._line(block, part, (image, together), i, line, taps)

    def _line(self, block: _Block, part: _Part, images, i, line, taps: Taps) -> None:
        """Emit the tiles of a row of the target, phase by phase of the columns."""
        (image, together), view = images, block.view
        row = i * self.rows.step + taps.offset - self.rows.offsets[0]
        x = bind(view.start + image * view.image + row * view.line)
        out = bind(image * block.size + line * (self.columns.target * self.s.width))
        inside = self._inside(bind((block.row + i) * self.rows.step + taps.offset), taps)
        for phase, across in enumerate(self.columns.phases):
            count = self.columns.count(phase)
            if count == 0 or across.number == 0:
                continue
            pixels = ceil_div(count, ceil_div(count, self.s.pixels))
            at = x + (across.offset - self.columns.offsets[0])

            def tiles(first, size, at=at, across=across, phase=phase) -> None:
                step = len(self.columns.phases)
                spread = [
                    (
                        i * view.image + column * self.columns.step,
                        i * block.size + column * step * self.s.width,
                    )
                    for i in range(together)
                    for column in range(size)
                ]
                place = bind(out + (first * step + phase) * self.s.width)
                read = bind(at + first * self.columns.step)
                self._tile(block, part, (read, place, spread), taps, inside, across)

            whole, rest = divmod(count, pixels)
            if whole > 1:
                with b.serial(0, whole) as j:
                    tiles(bind(j * pixels), pixels)
            else:
                tiles(const(0), pixels)
            if rest:
                tiles(const(whole * pixels), rest)

    def _inside(self, row, taps: Taps):
        """Return the range of the taps that read within the source, the first of them at this row."""
        if taps.move != 1 or self.rows.is_inside:
            return const(0), taps.number
        start = bind(tirx.max(const(0), -row))
        stop = tirx.min(taps.number, self.rows.source - row)
        return start, bind(tirx.max(start, stop))

    def _tile(self, block: _Block, part: _Part, tile, down: Taps, inside, across: Taps) -> None:
        """Emit what one tile adds to its sums."""
        view, sums, (read, place, spread) = block.view, block.sums, tile
        lanes, width, vectors = self.vectors.lanes, self.s.width, part.vectors
        total = Accumulators(self.vectors, len(spread) * vectors)
        for i, (_, offset) in enumerate(spread):
            for v in range(vectors):
                total[i * vectors + v] = self.vectors.load(sums, place + offset + v * lanes)
        ahead = self.s.depth * self.g.taps * width
        with b.serial(*inside) as p, b.serial(0, across.number) as q:
            tap = (down.first + p * down.step) * self.g.kernel[1] + across.first + q * across.step
            panel = bind(part.start + tap * part.depth * width)
            x = bind(read + p * (down.move * view.line) + q * across.move + part.first * view.plane)
            with b.serial(0, part.depth) as r:
                at = panel + r * width
                row = [bind(self.vectors.load(part.panels, at + v * lanes)) for v in range(vectors)]
                if self.s.is_streamed:
                    for v in range(vectors):
                        b.prefetch(part.panels, at + ahead + v * lanes)
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
        with b.serial(0, ceil_div(channels or self.s.width, lanes)) as v:

            def square(i, number) -> None:
                rows = [
                    bind(self.vectors.load(sums, start + (i + p) * self.s.width + v * lanes))
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
class _Block:
    """What a task computes: its source, its sums (so many for an image), its first row, their number.

    Rows are counted in those of a phase; ``height`` are the rows of the target.
    """

    view: View
    sums: tirx.Buffer
    size: int
    row: tirx.PrimExpr
    lines: tirx.PrimExpr
    height: tirx.PrimExpr


@dataclass(frozen=True)
class _Part:
    """A stretch of a panel: where it starts, its first source channel and their number, its vectors."""

    panels: tirx.Buffer
    start: tirx.PrimExpr
    first: tirx.PrimExpr
    depth: tirx.PrimExpr
    vectors: int


def _table(values: Sequence[int], index):
    """Return the value at an index, as a chain of selections."""
    result = const(values[-1])
    for i in reversed(range(len(values) - 1)):
        if values[i:] != values[i : i + 1] * (len(values) - i):
            result = tirx.Select(tirx.EQ(index, const(i)), const(values[i]), result)
    return result
