"""Convolutions of images and volumes and their data gradients, NC(D)HW with weights OI(D)HW.

Both are the same computation: an element of the target is a sum over taps of the kernel, and the
source element that a tap reads moves by a fixed step from one target element to the next. In a data
gradient with a stride, this holds within a phase: the target elements whose positions have the same
remainder modulo the stride (:class:`.gathering.Axis`). Each phase has its own taps, and no zeros
are inserted between the elements of the source.

The lanes of a vector are channels of the target. The weight is packed into panels ``[tap][source
channel][channels of a panel]``. The part of the source that a task needs is copied to
``[row][channel][column]`` with its padding: all channels, or one part of them after the other. A
tile of pixels is summed in registers: each step loads the vectors of a panel's row, and broadcasts
one element of the source for every pixel. Tiles are stored channels last until their block is
complete, and transposed in registers on the way out. For a volume, each image of the target is a
sum of convolutions of images: slices of the source with slices of the weight, except slices out of
bounds. The blocking follows Georganas et al., "Anatomy of High-Performance Deep Learning
Convolutions on SIMD Architectures" (2018).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tvm import tirx

from ...target import CPU
from ..language import amx
from ..language import builder as b
from ..language.builder import Accumulators, Extent, as_expr, bind, ceil_div, const
from ..language.epilogue import biases_from
from ..language.extents import LINE
from ..language.halves import Tensor
from ..language.statements import Emit
from ..language.stealing import shared
from ..matmul.pairs import add_products, imported, takes_pairs
from ._blocks import Blocking
from ._packing import Images, Packer, View
from ._pairs import BlockingOfPairs, PackerOfPairs
from .gathering import Gathering, Taps
from .geometry import Conv2d, Conv3d
from .tiles import ConvTiles, takes_conv


def conv2d(
    conv: Conv2d, cpu: CPU, shapes: Sequence[Sequence[Extent]] | None = None
) -> tirx.PrimFunc:
    """Return the kernel of a convolution: a function of data, weight and result (float32).

    Parameters
    ----------
    conv : Conv2d
        The convolution. It has at least one window and one channel.
    cpu : CPU
        The target CPU.
    shapes : Sequence, optional
        The shapes of the parameters, if they differ from ``conv``'s.
    """
    return _forward("conv2d", conv, Gathering.forward(conv.flattened), cpu, shapes)


def conv2d_backward_data(
    conv: Conv2d, cpu: CPU, shapes: Sequence[Sequence[Extent]] | None = None
) -> tirx.PrimFunc:
    """Return the kernel of the data gradient: a function of output gradient, weight and data
    gradient (float32).

    Parameters
    ----------
    conv, cpu, shapes
        As for :func:`conv2d`.
    """
    gathering = Gathering.backward(conv.flattened)
    return _backward("conv2d_backward_data", conv, gathering, cpu, shapes)


def conv3d(
    conv: Conv3d, cpu: CPU, shapes: Sequence[Sequence[Extent]] | None = None
) -> tirx.PrimFunc:
    """Return the kernel of a convolution of volumes: a function of data, weight and result
    (float32).

    Parameters
    ----------
    conv, cpu, shapes
        As for :func:`conv2d`.
    """
    return _forward("conv3d", conv, Gathering.forward(conv.slices, conv.depth), cpu, shapes)


def conv3d_backward_data(
    conv: Conv3d, cpu: CPU, shapes: Sequence[Sequence[Extent]] | None = None
) -> tirx.PrimFunc:
    """Return the kernel of the data gradient of :func:`conv3d`, of output gradient, weight and data
    gradient (float32).

    Parameters
    ----------
    conv, cpu, shapes
        As for :func:`conv2d`.
    """
    gathering = Gathering.backward(conv.slices, conv.depth)
    return _backward("conv3d_backward_data", conv, gathering, cpu, shapes)


def _forward(
    name: str,
    conv: Conv2d | Conv3d,
    gathering: Gathering,
    cpu: CPU,
    shapes: Sequence[Sequence[Extent]] | None,
) -> tirx.PrimFunc:
    shapes = shapes or (conv.data_shape, conv.weight_shape, conv.out_shape)
    return _function(name, ("data", "weight", "result"), shapes, gathering, cpu)


def _backward(
    name: str,
    conv: Conv2d | Conv3d,
    gathering: Gathering,
    cpu: CPU,
    shapes: Sequence[Sequence[Extent]] | None,
) -> tirx.PrimFunc:
    shapes = shapes or (conv.out_shape, conv.weight_shape, conv.data_shape)
    return _function(name, ("output_grad", "weight", "data_grad"), shapes, gathering, cpu)


def _function(
    name: str,
    names: Sequence[str],
    shapes: Sequence[Sequence[Extent]],
    gathering: Gathering,
    cpu: CPU,
) -> tirx.PrimFunc:
    def emit(source: Tensor, weight: Tensor, target: Tensor) -> None:
        if amx.takes_tiles(cpu, source, weight) and takes_conv(gathering):
            with amx.imported():
                ConvTiles(gathering, cpu).emit(source, weight, target)
        elif takes_pairs(cpu, source, weight):
            with imported():
                _OfPairs(gathering, cpu).emit(source, weight, target)
        else:
            _Generator(gathering, cpu).emit(source, weight, target)

    return b.prim_func(name, b.floats(names, shapes), emit)


#: Taps that read padding are skipped if a row has at most this many tiles, and less than this
#: fraction of its reads is in bounds.
_MOST_TILES = 3
_MOST_READ = 0.96


class _Generator:
    def __init__(self, gathering: Gathering, cpu: CPU):
        self.g, self.s, self.pack = self.parts(gathering, cpu)
        self.vectors = self.s.vectors
        self.rows, self.columns = gathering.rows, gathering.columns

    @staticmethod
    def parts(gathering: Gathering, cpu: CPU) -> tuple[Gathering, Blocking, Packer]:
        """Return the computation of the tiles, its partition, and its packing."""
        blocking = Blocking(gathering, cpu)
        return gathering, blocking, Packer(blocking)

    #: Adds a product of vectors to a sum.
    multiply: Callable = staticmethod(lambda total, value, row: total + value * row)

    def emit(self, source: Tensor, weight: Tensor, target: Tensor) -> None:
        """Emit the packing of the weight, and the tasks; each computes some panels for some rows of
        some images."""
        g = self.g
        panels = b.scratch(g.groups * self.s.panels * g.kernel[0] * self.s.panel_slice)
        self.pack.weight(weight, panels)
        blocks = bind(const(1) * self.s.image_blocks * self.s.row_blocks)
        parts = ceil_div(self.s.panels, self.s.task_panels)
        with shared(parts * blocks, self.s.cpu.cores) as task:
            block = bind(task % blocks)
            panel = bind((task // blocks) * self.s.task_panels)
            image = bind((block // self.s.row_blocks) * self.s.block_images)
            row = bind((block % self.s.row_blocks) * self.s.block_rows)
            images = Images.of(g, image, self.s.at_most(self.s.block_images, g.images, image))
            self._task(source, panels, target, images, row, panel)

    def _task(
        self,
        source: Tensor,
        panels: tirx.Buffer,
        target: Tensor,
        images: Images,
        row: Extent,
        panel: Extent,
    ) -> None:
        phases, slices, number = len(self.rows.phases), self.g.slices, images.number
        lines = self.s.at_most(self.s.block_rows, self.rows.count(), row)
        height = self.s.at_most(self.s.block_rows * phases, self.rows.target, row * phases)
        size = self.s.block_rows * phases * self.columns.target * self.s.width
        parts, each = self.s.source_parts, self.s.block_images * size
        # The last square of sums that is transposed may have rows beyond them.
        beyond = (self.vectors.lanes - 1) * self.s.width
        sums = b.scratch((self.s.task_panels if parts > 1 else 1) * each + beyond)
        last = bind(tirx.min(panel + self.s.task_panels, const(self.s.panels)))

        def each_panel(emit: Emit) -> None:
            with b.serial(panel, last) as j:
                start = bind((j - panel) * each) if parts > 1 else const(0)
                self._whole_or_part(j, lambda vectors, channels: emit(j, start, vectors, channels))

        def clear(start: Extent) -> None:
            with b.serial(0, number * (size // self.vectors.lanes)) as i:
                self.vectors.store(sums, start + i * self.vectors.lanes, self.vectors.splat(0))

        def add(j: Extent, start: Extent, vectors: int, view: View, stretches: tuple) -> None:
            block = _Block(view, sums, start, size, row, lines, height)
            images.each_tap(
                slices,
                lambda tap: self._stretches(block, panels, images, j, tap, vectors, stretches),
            )

        def finish(j: Extent, start: Extent, channels: int | None) -> None:
            with b.serial(0, number) as i:
                image = images.first + i
                channel = image // slices.target * self.g.targets + j * self.s.width
                line = row * (phases * self.columns.target)
                at = channel * slices.target + image % slices.target
                out = bind(at * (self.rows.target * self.columns.target) + line)
                self._finish(sums, start + i * size, target, out, height, channels)

        def all_of(view: View) -> Callable:
            def emit(j: Extent, start: Extent, vectors: int, channels: int | None) -> None:
                if not self.s.is_at_once:
                    clear(start)
                add(j, start, vectors, view, (0, self.s.depths))
                finish(j, start, channels)

            return emit

        if parts == 1:
            view = self.pack.source(source, images, row, lines, (const(0), self.g.sources))
            each_panel(all_of(view))
            return
        each_panel(lambda j, start, *_: clear(start))
        with b.serial(0, parts) as part:
            begin = bind(part * self.s.source_depths)
            end = bind(tirx.min(begin + self.s.source_depths, const(self.s.depths)))
            first = bind(begin * self.s.depth)
            channels = first, self.s.at_most(self.s.source_depth, self.g.sources, first)
            view = self.pack.source(source, images, row, lines, channels)
            each_panel(lambda j, start, vectors, _: add(j, start, vectors, view, (begin, end)))
        each_panel(lambda j, start, _, channels: finish(j, start, channels))

    def _stretches(
        self,
        block: _Block,
        panels: tirx.Buffer,
        images: Images,
        j: Extent,
        tap: Extent,
        vectors: int,
        stretches: tuple[int, int],
    ) -> None:
        """Emit the contributions of a slice of a panel to the images of a block."""
        block = replace(block, view=block.view.of_slice(tap))
        panel = images.volume % self.g.groups * self.s.panels + j
        kernel_slice = images.taps.first + tap * images.taps.step
        start = bind((panel * self.g.kernel[0] + kernel_slice) * self.s.panel_slice)
        with b.serial(*stretches) as k:
            first, depth = self.s.stretch(k)
            at = bind(start + first * (self.g.taps * self.s.width))
            self._images(block, _Part(panels, at, first, depth, vectors), images.number)

    def _whole_or_part(self, j: Extent, emit: Emit) -> None:
        """Emit the code for a whole panel, and for a partial last one with only the vectors that
        its channels need."""
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

    def _images(self, block: _Block, part: _Part, number: Extent) -> None:
        """Emit the contributions of a stretch of a panel to the images of a block; several images
        may share tiles."""
        together = self.s.tile_images
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

    def _rows(self, block: _Block, part: _Part, image: Extent, together: int) -> None:
        """Emit the rows of an image, or of ``together`` images, phase by phase."""
        phases = self.rows.phases
        image = bind(image)
        if len(phases) == 1:
            with b.serial(0, block.lines) as i:
                self._line(block, part, (image, together), i, i, phases[0])
            return
        with b.serial(0, len(phases)) as phase:
            taps = self.rows.taps(phase)
            with b.serial(0, block.lines) as i:
                line = bind(i * len(phases) + phase)
                with b.when(line < block.height):
                    self._line(block, part, (image, together), i, line, taps)

    def _line(
        self,
        block: _Block,
        part: _Part,
        images: tuple[tirx.PrimExpr, int],
        i: Extent,
        line: Extent,
        taps: Taps,
    ) -> None:
        """Emit the tiles of a row of the target, phase by phase of the columns."""
        (image, together), view = images, block.view
        row = i * self.rows.step + taps.offset - self.rows.offsets[0]
        x = bind(view.start + image * view.image + row * view.line)
        out = bind(block.start + image * block.size + line * (self.columns.target * self.s.width))
        start = bind((block.row + i) * self.rows.step + taps.offset)
        for phase, across in enumerate(self.columns.phases):
            count = self.columns.count(phase)
            if count == 0 or across.number == 0:
                continue
            pixels = ceil_div(count, ceil_div(count, self.s.pixels))
            at = x + (across.offset - self.columns.offsets[0])

            def tiles(
                first: Extent,
                size: int,
                inside: list[list[int]] | None = None,
                at: Extent = at,
                across: Taps = across,
                phase: int = phase,
            ) -> None:
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
                if inside is not None:
                    inside = [
                        [i * size + pixel for i in range(together) for pixel in tap]
                        for tap in inside
                    ]
                self._tile(block, part, (read, place, spread), (start, taps), across, inside)

            whole, rest = divmod(count, pixels)
            if self._skips(across, phase, pixels):
                for first in range(0, count, pixels):
                    size = min(pixels, count - first)
                    tiles(const(first), size, self._inside(across, first, size))
                continue
            if whole > 1:
                with b.serial(0, whole) as j:
                    tiles(bind(j * pixels), pixels)
            else:
                tiles(const(0), pixels)
            if rest:
                tiles(const(whole * pixels), rest)

    def _inside(self, across: Taps, first: int, size: int) -> list[list[int]]:
        """Return, for each tap, the columns of a tile whose reads are in bounds."""
        starts = [(first + i) * self.columns.step + across.offset for i in range(size)]
        return [
            [i for i, at in enumerate(starts) if 0 <= at + q * across.move < self.columns.source]
            for q in range(across.number)
        ]

    def _skips(self, across: Taps, phase: int, pixels: int) -> bool:
        """Tell whether skipping taps that read padding is worth separate code for each tile of a
        row."""
        count = self.columns.count(phase)
        read = sum(map(len, self._inside(across, 0, count)))
        return count <= _MOST_TILES * pixels and read < _MOST_READ * count * across.number

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

    def _tile(
        self,
        block: _Block,
        part: _Part,
        tile: tuple[tirx.PrimExpr, tirx.PrimExpr, list[tuple]],
        rows: tuple[tirx.PrimExpr, Taps],
        across: Taps,
        inside: list[list[int]] | None,
    ) -> None:
        """Emit one tile; ``inside`` lists the pixels that each tap contributes to, or is None for
        all."""
        view, sums, (read, place, spread) = block.view, block.sums, tile
        start, down = rows
        lanes, width, vectors = self.vectors.lanes, self.s.width, part.vectors
        total = Accumulators(self.vectors, len(spread) * vectors)
        for i, (_, offset) in enumerate(spread):
            for v in range(vectors):
                before = self.vectors.load(sums, place + offset + v * lanes)
                total[i * vectors + v] = self.vectors.splat(0) if self.s.is_at_once else before
        ahead = self.s.depth * self.g.taps * width

        def add(p: Extent, q: Extent, pixels: Sequence[int]) -> None:
            tap = (down.first + p * down.step) * self.g.kernel[2] + across.first + q * across.step
            panel = bind(part.start + tap * part.depth * width)
            x = bind(
                read + p * (down.move * view.line) + q * across.move + part.first * view.channel
            )
            lines = sorted({spread[i][0] // LINE * LINE for i in pixels})
            with b.serial(0, part.depth) as r:
                at = panel + r * width
                for line in lines if self.s.channels_ahead else ():
                    ahead_of = x + (r + self.s.channels_ahead) * view.channel + line
                    b.prefetch(view.buffer, ahead_of, level=1)
                row = [bind(self.vectors.load(part.panels, at + v * lanes)) for v in range(vectors)]
                if self.s.is_streamed:
                    for v in range(vectors):
                        b.prefetch(part.panels, at + ahead + v * lanes)
                for i in pixels:
                    offset = spread[i][0]
                    value = bind(self.vectors.splat(view.buffer[x + r * view.channel + offset]))
                    for v in range(vectors):
                        index = i * vectors + v
                        total[index] = self.multiply(total[index], value, row[v])

        def line(p: Extent) -> None:
            if inside is None:
                with b.serial(0, across.number) as q:
                    add(p, q, range(len(spread)))
                return
            for q, pixels in enumerate(inside):
                if pixels:
                    add(p, q, pixels)

        self._each_row(start, down, line)
        for i, (_, offset) in enumerate(spread):
            for v in range(vectors):
                self.vectors.store(sums, place + offset + v * lanes, total[i * vectors + v])

    def _finish(
        self,
        sums: tirx.Buffer,
        start: Extent,
        target: Tensor,
        out: Extent,
        height: Extent,
        channels: int | None,
    ) -> None:
        """Transpose the sums of a block into the target; ``channels`` is the number of channels of
        a partial panel."""
        lanes = self.vectors.lanes
        plane = self.g.slices.target * self.rows.target * self.columns.target
        extent = height * self.columns.target
        extent = int(extent) if isinstance(extent, tirx.IntImm) else extent
        if self.vectors.has_function(sums, target):
            with b.serial(0, ceil_div(channels or self.s.width, lanes)) as v:
                number = as_expr(channels or self.s.width) - v * lanes
                columns = (target, bind(out + v * (lanes * plane)), plane)
                place = bind(start + v * lanes)
                self.vectors.turn_rows((sums, place, self.s.width), extent, number, columns)
            return
        with b.serial(0, ceil_div(channels or self.s.width, lanes)) as v:
            bias = biases_from(target, out + v * (lanes * plane))

            def square(i: Extent, number: Extent | None) -> None:
                rows = []
                for p in range(lanes if not isinstance(number, int) else number):
                    at = const(p)
                    if number is not None:  # elements that do not exist repeat the last one
                        at = tirx.min(at, as_expr(number) - 1)
                    place = start + (i + at) * self.s.width + v * lanes
                    rows.append(bind(self.vectors.load(sums, place)))
                rows += [self.vectors.splat(0)] * (lanes - len(rows))
                for c, vector in enumerate(self.vectors.transpose(rows)):
                    at = out + (v * lanes + c) * plane + i
                    if channels is None or c < channels % lanes or channels % lanes == 0:
                        self.vectors.store(target, at, vector, number, bias(c))
                    elif channels > lanes:
                        with b.when(v < channels // lanes):
                            self.vectors.store(target, at, vector, number, bias(c))

            has_rest = self.columns.target % lanes != 0
            self.vectors.each(extent, square, has_rest=has_rest)


class _OfPairs(_Generator):
    """A generator for pairs of bfloat16: two source channels are one."""

    multiply = staticmethod(add_products)

    @staticmethod
    def parts(gathering: Gathering, cpu: CPU) -> tuple[Gathering, Blocking, Packer]:
        blocking = BlockingOfPairs(gathering, cpu)
        return blocking.g, blocking, PackerOfPairs(blocking, gathering.sources)


@dataclass(frozen=True)
class _Block:
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
class _Part:
    """A stretch of a panel: its offset, its first source channel, their number, and its number of
    vectors."""

    panels: tirx.Buffer
    start: tirx.PrimExpr
    first: tirx.PrimExpr
    depth: tirx.PrimExpr
    vectors: int
