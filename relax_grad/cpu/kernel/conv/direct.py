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
from dataclasses import replace

from tvm import tirx

from ...target import CPU
from ..language import amx
from ..language import builder as b
from ..language.builder import Extent, Vectors, as_expr, bind, ceil_div, const
from ..language.epilogue import biases_from
from ..language.halves import Tensor
from ..language.statements import Emit
from ..language.stealing import shared
from ..matmul.pairs import add_products, imported, takes_pairs
from ._direct_plan import DirectPlan, direct_plan, plan_of_pairs
from ._direct_rows import Block, Part, RowGenerator
from ._packing import Images, Packer, View, at_most, stretch_of
from ._pairs import PackerOfPairs
from ._tiles_plan import takes_conv, tiles_plan
from .gathering import Gathering
from .geometry import Conv2d, Conv3d
from .tiles import ConvTiles


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
                ConvTiles(tiles_plan(gathering, cpu)).emit(source, weight, target)
        elif takes_pairs(cpu, source, weight):
            with imported():
                plan = plan_of_pairs(gathering, cpu)
                pack = PackerOfPairs(plan, gathering.sources)
                _Generator(plan, pack, add_products).emit(source, weight, target)
        else:
            plan = direct_plan(gathering, cpu)
            _Generator(plan, Packer(plan), _multiply_add).emit(source, weight, target)

    return b.prim_func(name, b.floats(names, shapes), emit)


def _multiply_add(total: tirx.PrimExpr, value: tirx.PrimExpr, row: tirx.PrimExpr) -> tirx.PrimExpr:
    """Add a product of vectors to a sum."""
    return total + value * row


class _Generator:
    def __init__(self, plan: DirectPlan, pack: Packer, multiply: Callable):
        self.s, self.pack, self.g = plan, pack, plan.gathering
        self.vectors = Vectors(plan.lanes)
        self.rows, self.columns = self.g.rows, self.g.columns
        self.sum_rows = RowGenerator(plan, multiply)

    def emit(self, source: Tensor, weight: Tensor, target: Tensor) -> None:
        """Emit the packing of the weight, and the tasks; each computes some panels for some rows of
        some images."""
        g = self.g
        panels = b.scratch(g.groups * self.s.panels * g.kernel[0] * self.s.panel_slice)
        self.pack.weight(weight, panels)
        blocks = bind(const(1) * self.s.image_blocks * self.s.row_blocks)
        with shared(self.s.parts * blocks, self.s.cores) as task:
            block = bind(task % blocks)
            panel = bind((task // blocks) * self.s.task_panels)
            image = bind((block // self.s.row_blocks) * self.s.block_images)
            row = bind((block % self.s.row_blocks) * self.s.block_rows)
            images = Images.of(g, image, at_most(self.s.block_images, g.images, image))
            self._task(source, panels, target, images=images, row=row, panel=panel)

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
        lines = at_most(self.s.block_rows, self.rows.count(), row)
        height = at_most(self.s.block_rows * phases, self.rows.target, row * phases)
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
            block = Block(view, sums, start, size, row, lines, height)
            images.each_tap(
                slices,
                lambda tap: self._stretches(
                    block, panels, images, j=j, tap=tap, vectors=vectors, stretches=stretches
                ),
            )

        def finish(j: Extent, start: Extent, channels: int | None) -> None:
            with b.serial(0, number) as i:
                image = images.first + i
                channel = image // slices.target * self.g.targets + j * self.s.width
                line = row * (phases * self.columns.target)
                at = channel * slices.target + image % slices.target
                out = bind(at * (self.rows.target * self.columns.target) + line)
                self._finish(
                    sums, start + i * size, target, out=out, height=height, channels=channels
                )

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
            channels = first, at_most(self.s.source_depth, self.g.sources, first)
            view = self.pack.source(source, images, row, lines, channels)
            each_panel(lambda j, start, vectors, _: add(j, start, vectors, view, (begin, end)))
        each_panel(lambda j, start, _, channels: finish(j, start, channels))

    def _stretches(
        self,
        block: Block,
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
            first, depth = stretch_of(self.s, k)
            at = bind(start + first * (self.g.taps * self.s.width))
            self.sum_rows.emit(block, Part(panels, at, first, depth, vectors), images.number)

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
