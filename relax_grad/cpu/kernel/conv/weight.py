"""The weight gradient of convolution: ``dW[o, c, k] = sum over n, y of dY[n, o, y] X[n, c, y * s +
k * d - p]``.

Vectors hold neighbouring channels of X, and are multiplied by a splat of dY. The images are
processed in chunks. For each chunk and each block of input channels, X is copied to
``[image][row][column][channel]``, with its zero padding and without columns that are not read; the
copy fits in the second-level cache. Then each block of output channels and each row of the kernel
is a tile, whose sums stay in registers over the whole chunk.

Each thread computes a range of output and of input channels, and makes its own copies. So threads
do not wait for each other, and every sum is in the order of the images, whatever the number of
threads.

The images of volumes are their slices: each slice of the weight gradient is the weight gradient of
a convolution of images.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from tvm import tirx

from ...target import CPU
from ..language import amx
from ..language import builder as b
from ..language.builder import Accumulators, Extent, Vectors, as_expr, bind, const
from ..language.halves import Half, Tensor
from ..matmul.pairs import (
    add_products,
    imported,
    joined_widened,
    only_first,
    pair_at,
    single_at,
    takes_pairs,
)
from ._channels_last import Block, channels_of_taps, pack_channels
from ._chunks import Chunk, share, unless_empty, whole_or_rest
from ._tiles_plan import takes_weight_gradient, weight_tiles_plan
from ._weight_plan import WeightPlan, weight_plan
from .geometry import ONE, Conv2d, Conv3d, Windows
from .weight_tiles import ConvWeightTiles


def conv_weight(
    conv: Conv2d, cpu: CPU, shapes: Sequence[Sequence[Extent]] | None = None
) -> tirx.PrimFunc:
    """Return the kernel: a function of dY, X and dW (float32) that sets dW to the weight gradient.

    Parameters
    ----------
    conv : Conv2d
        The convolution.
    cpu : CPU
        The target CPU.
    shapes : Sequence, optional
        The shapes of the parameters dY, X and dW, if they differ from the convolution's.
    """
    shapes = shapes or [conv.out_shape, conv.data_shape, conv.weight_shape]
    params = b.floats(("DY", "X", "DW"), shapes)
    emit = partial(_emit, conv, ONE, cpu)
    return b.prim_func("conv_weight", params, emit)


def conv3d_weight(
    conv: Conv3d, cpu: CPU, shapes: Sequence[Sequence[Extent]] | None = None
) -> tirx.PrimFunc:
    """Return the kernel for convolutions of volumes: a function of dY, X and dW (float32) that sets
    dW.

    Parameters as for :func:`conv_weight`.
    """
    shapes = shapes or [conv.out_shape, conv.data_shape, conv.weight_shape]
    params = b.floats(("DY", "X", "DW"), shapes)
    emit = partial(_emit, conv.slices, conv.depth, cpu)
    return b.prim_func("conv3d_weight", params, emit)


def _emit(conv: Conv2d, depth: Windows, cpu: CPU, dy: Half, x: Half, dw: Tensor) -> None:
    if amx.takes_tiles(cpu, dy, x) and depth == ONE and takes_weight_gradient(conv):
        with amx.imported():
            ConvWeightTiles(weight_tiles_plan(conv, cpu)).emit(dy, x, dw)
    elif takes_pairs(cpu, dy, x):
        with imported():
            _OfPairs(weight_plan(conv, cpu, depth)).emit(dy, x, dw)
    else:
        _Generator(weight_plan(conv, cpu, depth)).emit(dy, x, dw)


class _Generator:
    def __init__(self, plan: WeightPlan):
        self.plan, self.conv, self.depth, self.tile = plan, plan.conv, plan.depth, plan.tile
        self.vectors, self.chunks = Vectors(plan.lanes), plan.chunks

    def emit(self, dy: Half, x: Half, dw: Tensor) -> None:
        size = b.count(self.conv.weight_shape) * self.depth.kernel
        unless_empty(self.conv.batch, dw, size, self.vectors, lambda: self._divided(dy, x, dw))

    def _divided(self, dy: Half, x: Half, dw: Tensor) -> None:
        """Emit the loop over threads, each with a range of input and of output channels."""
        conv, tile = self.conv, self.tile
        lanes, taps = self.plan.lanes, self.plan.taps
        between = taps > 1 and not self.plan.is_at_once
        # The last square of taps that is transposed may have rows beyond them.
        beyond = -taps % lanes * lanes
        if between:
            kept = b.scratch(conv.out_channels * self.plan.in_vectors * taps * lanes + beyond)
        by_in, by_out = self.plan.parts
        with b.parallel(0, conv.groups * by_in * by_out) as part:
            group = bind(part // (by_in * by_out)) if conv.groups > 1 else const(0)
            ins = share(bind(part // by_out % by_in), by_in, self.plan.in_blocks)
            outs = share(bind(part % by_out), by_out, self.plan.out_blocks)
            pixels = self.chunks.images * self.plan.span * self.plan.columns
            packed = b.scratch(pixels * tile.vectors * lanes)
            if not between:
                kept = b.scratch(tile.outs * tile.vectors * taps * lanes + beyond)
            sums = _Sums(self, dw, kept)
            self.chunks.each(
                lambda chunk: self._chunk(
                    chunk, dy, x, packed=packed, sums=sums, channels=(group, ins, outs)
                )
            )

    def _chunk(
        self, chunk: Chunk, dy: Half, x: Half, packed: tirx.Buffer, sums: _Sums, channels: tuple
    ) -> None:
        tile = self.tile
        group, ins, outs = channels
        with b.serial(*ins) as i:
            vector = bind(i * tile.vectors)

            def work(vectors: int) -> None:
                with b.serial(0, self.depth.kernel) as tap:
                    self._pack(
                        chunk, x, packed, group=group, vector=vector, vectors=vectors, tap=tap
                    )
                    with b.serial(*outs) as o:
                        out = bind(group * self.plan.outs + o * tile.outs)
                        whole_or_rest(
                            o,
                            self.plan.outs,
                            tile.outs,
                            lambda number: self._tiles(
                                chunk, dy, packed, sums, _Place(out, number, vector, vectors, tap)
                            ),
                        )

            whole_or_rest(i, self.plan.in_vectors, tile.vectors, work)

    def _pack(
        self,
        chunk: Chunk,
        x: Half,
        packed: tirx.Buffer,
        group: tirx.PrimExpr,
        vector: tirx.PrimExpr,
        vectors: int,
        tap: tirx.PrimExpr,
    ) -> None:
        """Copy the elements of X that a chunk reads of a block of input channels."""
        plan, height, lanes, depth = self.plan, self.conv.height, self.plan.lanes, self.depth

        def pack(i: tirx.PrimExpr, volume: tirx.PrimExpr, at: tirx.PrimExpr) -> None:
            plane = bind((volume * self.conv.in_channels + group * self.plan.ins) * depth.size + at)
            with b.serial(0, vectors) as v:
                target = bind((i * plan.span * plan.columns * plan.tile.vectors + v) * lanes)
                channel = bind((vector + v) * lanes)
                pack_channels(
                    self.vectors,
                    self.conv.width,
                    height,
                    block=Block(x, plane, channel, self.plan.ins, depth.size),
                    rows=(bind(chunk.row * height.steps[0]), bind(height.span(chunk.rows))),
                    target=(packed, target, self.tile.vectors * lanes),
                )
                self._finish_packing(packed, target, bind(height.span(chunk.rows)))

        with b.serial(0, chunk.images) as i:
            volume, _, at, is_inside = self._slice(chunk.image + i, tap)
            if is_inside is None:
                pack(i, volume, at)
            else:
                with b.when(is_inside):
                    pack(i, volume, at)

    def _finish_packing(
        self, packed: tirx.Buffer, start: tirx.PrimExpr, rows: tirx.PrimExpr
    ) -> None:
        """Emit nothing."""

    def _slice(self, image: tirx.PrimExpr, tap: tirx.PrimExpr) -> tuple:
        """Return the volume of an image, its slice index, the slice of X that it reads, and whether
        that is in bounds.

        The last is None if all slices are in bounds.
        """
        depth = self.depth
        volume, index = bind(image // depth.number), bind(image % depth.number)
        at = bind(index * depth.stride + tap * depth.dilation - depth.before)
        is_inside = None if depth.is_inside else tirx.all(at >= 0, at < depth.size)
        return volume, index, at, is_inside

    def _tiles(
        self, chunk: Chunk, dy: Half, packed: tirx.Buffer, sums: _Sums, place: _Place
    ) -> None:
        """Emit the tiles of some output channels: one for each row of the kernel."""
        kernel = self.conv.width.kernel
        with b.serial(0, self.conv.height.kernel) as row:
            for first in range(0, kernel, self.tile.columns):
                taps = range(first, min(first + self.tile.columns, kernel))
                self._tile(chunk, dy, packed, sums=sums, place=place, kernel_row=row, taps=taps)
        sums.finish(chunk, place)

    def _tile(
        self,
        chunk: Chunk,
        dy: Half,
        packed: tirx.Buffer,
        sums: _Sums,
        place: _Place,
        kernel_row: tirx.PrimExpr,
        taps: range,
    ) -> None:
        conv, lanes = self.conv, self.plan.lanes
        width = conv.width
        stride, dilation = width.steps
        pixel = self.tile.vectors * lanes
        plane = conv.height.number * width.number
        channel = self.depth.number * plane
        cells = [(o, k, v) for o in range(place.outs) for k in taps for v in range(place.vectors)]
        total = Accumulators(self.vectors, len(cells))
        for i in range(len(cells)):
            total[i] = self.vectors.splat(0)

        def line(
            i: tirx.PrimExpr, r: tirx.PrimExpr, volume: tirx.PrimExpr, index: tirx.PrimExpr
        ) -> None:
            image = (volume * conv.out_channels + place.out) * self.depth.number + index
            grad = bind(image * plane + (chunk.row + r) * width.number)
            row = r * conv.height.steps[0] + kernel_row * conv.height.steps[1]
            source = bind((i * self.plan.span + row) * (self.plan.columns * pixel))

            def step(
                start: tirx.PrimExpr,
                columns: Sequence[int],
                read: tuple[Callable, Callable],
                grad: tirx.PrimExpr = grad,
                source: tirx.PrimExpr = source,
            ) -> None:
                here, there = bind(grad + start), bind(source + start * (stride * pixel))
                of_dy, of_x = read
                for j in columns:
                    offsets = {
                        (k, v): (j * stride + k * dilation) * pixel + v * lanes
                        for k in taps
                        for v in range(place.vectors)
                    }
                    data = {
                        key: bind(of_x(self.vectors.load(packed, there + offset)))
                        for key, offset in offsets.items()
                    }
                    for index, (o, k, v) in enumerate(cells):
                        if (k, v) == (taps[0], 0):
                            splat = self.vectors.splat(of_dy(dy, here + (o * channel + j)))
                            value = bind(splat)
                        total[index] = self.multiply(total[index], value, data[k, v])

            self._each_column(step)

        with b.serial(0, chunk.images) as i:
            volume, index, _, is_inside = self._slice(chunk.image + i, place.slice)
            rows = chunk.rows
            if is_inside is not None:
                rows = bind(tirx.Select(is_inside, as_expr(rows), const(0)))
            with b.serial(0, rows) as r:
                line(i, r, volume, index)
        sums.add(chunk, place, kernel_row, cells, total)

    #: Adds a product of vectors to a sum.
    multiply: Callable = staticmethod(lambda total, value, data: total + value * data)

    def _each_column(self, step: Callable) -> None:
        """Emit ``step(start, columns, read)`` along a row of the output, some columns at a time:
        the columns are offsets from the start, and ``read`` has the readers of dY and of a vector
        of X."""
        extent, read = self.conv.width.number, (operator.getitem, lambda data: data)
        size = min(self.plan.unroll, extent)
        if extent >= size:
            with b.serial(0, extent // size) as i:
                step(bind(i * size), range(size), read)
        if extent % size:
            step(const(extent - extent % size), range(extent % size), read)


class _OfPairs(_Generator):
    """A generator for pairs of bfloat16: the elements of two neighbouring windows.

    A column of the copy of X holds the pairs of its elements and those that the next window reads.
    """

    multiply = staticmethod(add_products)

    def _finish_packing(
        self, packed: tirx.Buffer, start: tirx.PrimExpr, rows: tirx.PrimExpr
    ) -> None:
        """Pair the columns of rows of a vector of channels."""
        pixel, stride = self.tile.vectors * self.plan.lanes, self.conv.width.steps[0]
        alone = min(stride, self.plan.columns)
        with b.serial(0, rows) as row:
            here = bind(start + row * (self.plan.columns * pixel))

            def pair(
                column: tirx.PrimExpr, following: Callable, here: tirx.PrimExpr = here
            ) -> None:
                at = bind(here + column * pixel)
                data = bind(self.vectors.load(packed, at))
                self.vectors.store(packed, at, joined_widened(data, following(at)))

            with b.serial(0, self.plan.columns - alone) as column:
                pair(column, lambda at: bind(self.vectors.load(packed, at + stride * pixel)))
            with b.serial(self.plan.columns - alone, self.plan.columns) as column:
                pair(column, lambda _: self.vectors.splat(0))

    def _each_column(self, step: Callable) -> None:
        extent = self.conv.width.number
        size = min(2 * self.plan.unroll, extent - extent % 2)
        rest = extent % size if size else extent
        if size:
            with b.serial(0, extent // size) as i:
                step(bind(i * size), range(0, size, 2), (pair_at, lambda data: data))
        if rest > 1:
            step(const(extent - rest), range(0, rest - rest % 2, 2), (pair_at, lambda data: data))
        if rest % 2:
            step(const(extent - 1), [0], (single_at, only_first))


@dataclass(frozen=True)
class _Place:
    """The location of a tile: output channels, vectors of input channels, and a slice of the
    kernel."""

    out: tirx.PrimExpr
    outs: int
    vector: tirx.PrimExpr
    vectors: int
    slice: tirx.PrimExpr


class _Sums:
    """The storage of sums between chunks, and their transfer to dW.

    The sums of a 1x1 kernel are stored in dW itself. Others are vectors of channels in a buffer:
    for all sums, or for the sums of one block if there is a single chunk.
    """

    def __init__(self, generator: _Generator, dw: Tensor, buffer: tirx.Buffer):
        self._g, self._dw, self._buffer = generator, dw, buffer

    def add(
        self,
        chunk: Chunk,
        place: _Place,
        kernel_row: tirx.PrimExpr,
        cells: list[tuple[int, int, int]],
        total: Accumulators,
    ) -> None:
        """Add the sums of a tile to the sums of the previous chunks."""
        places = [self._kept(place, kernel_row, cell) for cell in cells]
        vectors = self._g.vectors

        def store(add: bool) -> None:
            for i, (buffer, index, number) in enumerate(places):
                before = vectors.load(buffer, index, number) if add else None
                value = before + total[i] if add else total[i]
                vectors.store(buffer, index, value, number)

        if self._g.chunks.is_one:
            store(add=False)
        else:
            b.either(chunk.is_first, lambda: store(add=False), lambda: store(add=True))

    def _kept(
        self, place: _Place, kernel_row: tirx.PrimExpr, cell: tuple[int, int, int]
    ) -> tuple[tirx.Buffer, tirx.PrimExpr, None]:
        """Return the buffer and index of a vector, and the number of its channels that exist (None:
        all of them)."""
        (o, k, v), g = cell, self._g
        lanes, channels = g.plan.lanes, g.plan.ins
        if g.plan.taps == 1:
            channel = (place.vector + v) * lanes
            may_end = channels % lanes and v == place.vectors - 1
            number = tirx.min(const(lanes), channels - channel) if may_end else None
            return self._dw, (place.out + o) * channels + channel, number
        row = place.slice * g.conv.height.kernel + kernel_row
        tap = row * g.conv.width.kernel + k
        return self._buffer, (self._block(place, o, v) * g.plan.taps + tap) * lanes, None

    def _block(self, place: _Place, o: Extent, v: Extent) -> Extent:
        """Return the index of a group of vectors, one for each tap."""
        g = self._g
        if g.plan.is_at_once:
            return o * g.tile.vectors + v
        return (place.out + o) * g.plan.in_vectors + place.vector + v

    def finish(self, chunk: Chunk, place: _Place) -> None:
        """Write the sums of all taps to dW after the last chunk."""
        g = self._g
        if g.plan.taps == 1:
            return

        def write() -> None:
            with b.serial(0, place.outs) as o, b.serial(0, place.vectors) as v:
                source = bind(self._block(place, o, v) * (g.plan.taps * g.plan.lanes))
                channel = bind((place.vector + v) * g.plan.lanes)
                target = bind(((place.out + o) * g.plan.ins + channel) * g.plan.taps)
                whole_or_rest(
                    place.vector + v,
                    g.plan.ins,
                    g.plan.lanes,
                    lambda channels: channels_of_taps(
                        g.vectors, (self._buffer, source), g.plan.taps, channels, (self._dw, target)
                    ),
                )

        if g.plan.is_at_once:
            write()
        else:
            is_last = tirx.EQ(place.slice, const(g.depth.kernel - 1))
            with b.when(tirx.all(chunk.is_last, is_last)):
                write()
