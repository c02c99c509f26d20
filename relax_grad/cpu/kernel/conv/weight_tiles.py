"""The weight gradient of convolutions of images of bfloat16 by tiles (AMX): ``dW[o, c, tap] = sum
over n, y of dY[n, o, y] X[n, c, y * s + tap * d - p]``.

Each tap is a matrix product of rows of dY and of columns of X over the pixels of the images, in
chunks whose copy of X stays in a first-level cache. For a column of the kernel, X is copied as
``[row][pair of columns of dY][channel]``: the elements that the columns of dY read, with their
padding. Its rows correspond to the rows of dY, so that a row of the kernel is an offset. dY is
copied as ``[channel][row][column]``, padded with zeros to whole tiles. Each chunk adds to the sums
of the chunks before, in tiles.

Each thread computes a range of output and of input channels, as in :mod:`.weight`. Images are
summed in order, whatever the number of threads.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm.tirx.script.builder as T
from tvm import tirx

from ...target import CPU
from ..language import amx
from ..language import builder as b
from ..language.builder import Extent, Vectors, as_expr, bind, ceil_div, const
from ..language.halves import Half, Tensor
from ..language.statements import Emit
from ..matmul.pairs import only_first
from ._amx_lines import Lines, elements_of
from ._channels_last import channels_of_taps
from ._chunks import share, unless_empty, whole_or_rest
from .gathering import Axis
from .geometry import Conv2d

#: The elements of k in a step of tiles, and the fewest channels of a group for tiles.
_ELEMENTS = 2 * amx.STEPS
_FEWEST_CHANNELS = 16

#: The channels of a block of dY, and of a block of X.
_OUTS, _INS = amx.ROWS, amx.COLUMNS


def takes_weight_gradient(conv: Conv2d) -> bool:
    """Tell whether tiles compute a weight gradient faster than vectors."""
    return min(conv.in_channels, conv.out_channels) // conv.groups >= _FEWEST_CHANNELS


@dataclass(frozen=True)
class _Chunk:
    """Some rows of some images.

    Attributes
    ----------
    image, images : tirx.PrimExpr
        The first image, and their number.
    row, lines : tirx.PrimExpr
        The first row of dY, and their number.
    is_first, is_last : tirx.PrimExpr
        Whether it is the first chunk, and the last.
    """

    image: tirx.PrimExpr
    images: tirx.PrimExpr
    row: tirx.PrimExpr
    lines: tirx.PrimExpr
    is_first: tirx.PrimExpr
    is_last: tirx.PrimExpr


class ConvWeightTiles:
    """A generator of weight gradients by tiles.

    Parameters
    ----------
    conv : Conv2d
        The convolution; :func:`takes_weight_gradient` holds for it.
    cpu : CPU
        The processor, which has tiles.
    """

    def __init__(self, conv: Conv2d, cpu: CPU):
        most = 2 * cpu.tuning.tiles.unit_depth
        self.conv, self.cpu = conv.with_rows_of(most), cpu
        self.vectors = Vectors(cpu.lanes)
        self.rows = Lines(Axis.forward(self.conv.height))
        self.columns = Lines(Axis.forward(self.conv.width))
        self.ins, self.outs = conv.in_channels // conv.groups, conv.out_channels // conv.groups
        self.in_blocks, self.out_blocks = ceil_div(self.ins, _INS), ceil_div(self.outs, _OUTS)
        self.height, self.width = self.conv.out_size
        self.taps = conv.kernel[0] * conv.kernel[1]
        # Pairs of columns of dY are on one row.
        self.pitch = ceil_div(self.width, 2) * 2
        self.lines = max(1, min(self.height, most // self.pitch))
        self.lines = ceil_div(self.height, ceil_div(self.height, self.lines))
        self.images = max(1, most // (self.lines * self.pitch)) if self.lines == self.height else 1
        if isinstance(conv.batch, int):
            self.images = min(self.images, max(conv.batch, 1))
        self.depth = ceil_div(self.lines * self.pitch, _ELEMENTS) * _ELEMENTS
        # An odd number of cache lines, so that the rows of a tile are in different sets.
        self.row = (ceil_div(self.images * self.depth, _ELEMENTS) | 1) * _ELEMENTS
        self.reads = self.lines + self.rows.span - 1
        self.line = ceil_div(self.pitch, _ELEMENTS) * _ELEMENTS + self.columns.span + 1
        self.plane = self.reads * (self.pitch // 2)
        self.image = len(self.rows.remainders) * self.plane * _INS

    def emit(self, dy: Half, x: Half, dw: Tensor) -> None:
        """Emit the kernel."""
        size = b.count(self.conv.weight_shape)
        unless_empty(self.conv.batch, dw, size, self.vectors, lambda: self._divided(dy, x, dw))

    def _divided(self, dy: Half, x: Half, dw: Tensor) -> None:
        """Emit the loop over threads, each with a range of input and of output channels."""
        conv, (by_in, by_out) = self.conv, self._parts()
        each_in, each_out = ceil_div(self.in_blocks, by_in), ceil_div(self.out_blocks, by_out)
        with b.parallel(0, conv.groups * by_in * by_out) as part:
            group = bind(part // (by_in * by_out)) if conv.groups > 1 else const(0)
            ins = share(bind(part // by_out % by_in), by_in, self.in_blocks)
            outs = share(bind(part % by_out), by_out, self.out_blocks)
            sums = b.scratch(each_in * each_out * self.taps * amx.SIZE)
            grads = b.scratch(each_out * _OUTS * self.row + _ELEMENTS, "uint16")
            rows = len(self.rows.remainders) * self.reads * len(self.columns.remainders)
            lines = b.scratch(self.images * rows * _INS * self.line, "uint16")
            tails = self.images * conv.kernel[0] * (amx.STEPS * _INS)
            packed = b.scratch(self.images * self.image + tails)
            buffers = (grads, lines, packed, sums)
            with amx.tiles():
                self._each_chunk(
                    lambda chunk: self._chunk(chunk, dy, x, dw, buffers, (group, ins, outs))
                )

    def _parts(self) -> tuple[int, int]:
        """Return the ranges of blocks of input and of output channels, for the threads."""
        cores = ceil_div(self.cpu.cores, self.conv.groups)

        def time(parts: tuple[int, int]) -> tuple[int, int]:
            by_in, by_out = parts
            # Copying a block of X costs as much as a few blocks of dY.
            each = ceil_div(self.in_blocks, by_in)
            return each * (ceil_div(self.out_blocks, by_out) + 2), by_out

        grids = [
            (i, min(self.out_blocks, max(1, cores // i)))
            for i in range(1, min(cores, self.in_blocks) + 1)
        ]
        return min(grids, key=time)

    def _each_chunk(self, emit: Emit) -> None:
        down = ceil_div(self.height, self.lines)
        blocks = bind(as_expr(ceil_div(self.conv.batch, self.images)))
        with b.serial(0, blocks) as i, b.serial(0, down) as j:
            image, row = bind(i * self.images), bind(j * self.lines)
            images = bind(tirx.min(const(self.images), as_expr(self.conv.batch) - image))
            lines = bind(tirx.min(const(self.lines), const(self.height) - row))
            first = tirx.all(tirx.EQ(i, const(0)), tirx.EQ(j, const(0)))
            last = tirx.all(tirx.EQ(i, blocks - 1), tirx.EQ(j, const(down - 1)))
            emit(_Chunk(image, images, row, lines, bind(first), bind(last)))

    def _chunk(
        self, chunk: _Chunk, dy: Half, x: Half, dw: Tensor, buffers: tuple, channels: tuple
    ) -> None:
        """Emit the products of a chunk."""
        (grads, lines, packed, sums), (group, ins, outs) = buffers, channels
        self._copy_grads(chunk, dy, grads, group, outs)
        number = bind(outs[1] - outs[0])
        with b.serial(*ins) as i:
            self._copy_lines(chunk, x, lines, group, i)
            with b.serial(0, self.conv.kernel[1]) as column:
                self._pack(chunk, lines, packed, column)
                self._copy_tails(chunk, packed)
                with b.serial(*outs) as o, b.serial(0, self.conv.kernel[0]) as row:
                    block = bind((i - ins[0]) * number + o - outs[0])
                    tap = row * self.conv.kernel[1] + column
                    at = bind((block * self.taps + tap) * amx.SIZE)
                    rows = bind((o - outs[0]) * (_OUTS * self.row))
                    self._add(chunk, (grads, rows), packed, (sums, at), row)
            with b.when(chunk.is_last), b.serial(*outs) as o:
                block = bind(((i - ins[0]) * number + o - outs[0]) * (self.taps * amx.SIZE))
                self._finish(sums, block, dw, group, (i, o))

    def _copy_grads(
        self, chunk: _Chunk, dy: Half, grads: tirx.Buffer, group: tirx.PrimExpr, outs: tuple
    ) -> None:
        """Emit the copy of dY as ``[channel][image][row][column]``, with zeros to whole tiles, and
        in place of channels that do not exist."""
        plane, lanes = self.height * self.width, self.vectors.lanes
        size, own = bind(chunk.lines * self.pitch), tirx.Ramp(const(0), const(1), 2 * lanes)
        zero = tirx.Broadcast(tirx.const(0, "uint16"), 2 * lanes)
        last = bind(tirx.min(outs[1] * _OUTS, const(self.outs)))
        with b.serial(bind(outs[0] * _OUTS), bind(outs[1] * _OUTS)) as o:
            start = bind((o - outs[0] * _OUTS) * self.row)

            def clear(start: tirx.PrimExpr = start) -> None:
                b.clear(grads, start, self.row)

            def copy(o: tirx.PrimExpr = o, start: tirx.PrimExpr = start) -> None:
                with b.serial(0, chunk.images) as m:
                    channel = (chunk.image + m) * self.conv.out_channels + group * self.outs + o
                    here = bind(channel * plane + chunk.row * self.width)
                    to = bind(start + m * self.depth)
                    # The last tile; its elements are written again.
                    tail = bind(size // _ELEMENTS * _ELEMENTS)
                    T.buffer_store(grads, zero, [_ramp(to + tail, own)])
                    if self.pitch == self.width:
                        _copy_bits(grads, to, dy.raw, here, size)
                        return
                    with b.serial(0, chunk.lines) as y:
                        at = bind(to + y * self.pitch)
                        _copy_bits(grads, at, dy.raw, bind(here + y * self.width), self.width)
                        b.store(grads, at + self.width, tirx.const(0, "uint16"))

            if self.outs % _OUTS:
                b.either(o < last, copy, clear)
            else:
                copy()

    def _copy_lines(
        self, chunk: _Chunk, x: Half, lines: tirx.Buffer, group: tirx.PrimExpr, i: tirx.PrimExpr
    ) -> None:
        """Emit the copy of the rows of X that a chunk reads of a block of channels, with their
        padding: ``[image][remainder and row][remainder of columns][channel][column]``."""
        conv, rows, columns = self.conv, self.rows, self.columns
        stored = rows.axis.stored * columns.axis.stored
        length = self.pitch + columns.span - 1
        with b.serial(0, chunk.images) as m, b.serial(0, len(rows.remainders)) as j:
            down = rows.remainder(j)
            with b.serial(0, bind(chunk.lines + rows.span - 1)) as y:
                line = bind((chunk.row + y + rows.floors[0]) * rows.axis.step + down)
                row = bind((m * len(rows.remainders) + j) * self.reads + y)
                for k, across in enumerate(columns.remainders):
                    block = row * len(columns.remainders) + k
                    with b.serial(0, _INS) as c:
                        to = bind((block * _INS + c) * self.line)
                        channel = bind(i * _INS + c)
                        plane = (chunk.image + m) * conv.in_channels + group * self.ins + channel
                        here = bind(plane * stored + line * (rows.axis.apart * columns.axis.stored))
                        inside = [line >= 0, line < rows.axis.source]
                        if self.ins % _INS:
                            inside.append(channel < self.ins)

                        def copy(
                            to: tirx.PrimExpr = to, here: tirx.PrimExpr = here, across: int = across
                        ) -> None:
                            self._copy_line(x, here, lines, to, across, length)

                        def clear(to: tirx.PrimExpr = to) -> None:
                            b.clear(lines, to, length)

                        b.either(tirx.all(*inside), copy, clear)

    def _copy_line(
        self,
        x: Half,
        here: tirx.PrimExpr,
        lines: tirx.Buffer,
        to: tirx.PrimExpr,
        remainder: int,
        length: int,
    ) -> None:
        """Emit the copy of a row of a channel, with its padding."""
        axis = self.columns.axis
        begin, end = self.columns.inside(remainder, length)
        for first, last in ((0, begin), (end, length)):
            if last > first:
                b.clear(lines, to + first, last - first)
        if begin == end:
            return
        step = axis.step * axis.apart
        element = (begin + self.columns.floors[0]) * axis.step + remainder
        start = bind(here + element * axis.apart)
        if step == 1:
            _copy_bits(lines, bind(to + begin), x.raw, start, end - begin)
            return
        with b.serial(0, end - begin) as k:
            b.store(lines, to + begin + k, elements_of(x, start + k * step))

    def _pack(
        self, chunk: _Chunk, lines: tirx.Buffer, packed: tirx.Buffer, column: tirx.PrimExpr
    ) -> None:
        """Emit the copy of a block of channels of X as pairs of the columns that a column of the
        kernel reads: squares of 16 channels and 16 pairs, transposed."""
        lanes, vectors, columns = self.vectors.lanes, self.vectors, self.columns
        pairs, rows = self.pitch // 2, len(self.rows.remainders)
        remainder, x = columns.place(columns.axis.phases[0], column)
        number = bind(chunk.lines + self.rows.span - 1)
        with b.serial(0, chunk.images) as m, b.serial(0, rows) as j, b.serial(0, number) as y:
            row = bind((m * rows + j) * self.reads + y)
            block = bind((row * len(columns.remainders) + remainder) * _INS)
            target = bind(m * self.image + (j * self.plane + y * pairs) * _INS)
            with b.serial(0, _INS // lanes) as half:

                def square(
                    first: tirx.PrimExpr,
                    size: int,
                    half: tirx.PrimExpr = half,
                    block: tirx.PrimExpr = block,
                    target: tirx.PrimExpr = target,
                ) -> None:
                    at = bind(x + 2 * first)
                    channels = [
                        _pairs(lines, bind((block + half * lanes + c) * self.line + at), lanes)
                        for c in range(lanes)
                    ]
                    for p, vector in enumerate(vectors.transpose(channels)[:size]):
                        place = bind(target + (first + p) * _INS + half * lanes)
                        vectors.store(packed, place, vector)

                if pairs >= lanes:
                    with b.serial(0, pairs // lanes) as k:
                        square(bind(k * lanes), lanes)
                if pairs % lanes:
                    square(const(pairs // lanes * lanes), pairs % lanes)
                if self.width % 2:
                    # A window beyond the last one would read the other element.
                    last = bind(target + (pairs - 1) * _INS + half * lanes)
                    vectors.store(packed, last, only_first(vectors.load(packed, last)))

    @property
    def _has_tails(self) -> bool:
        """Whether the pixels of a chunk may be other than whole tiles."""
        chunks = {self.lines, self.height % self.lines or self.lines}
        return any(lines * self.pitch % _ELEMENTS for lines in chunks)

    def _tail(self, m: tirx.PrimExpr, row: tirx.PrimExpr) -> tirx.PrimExpr:
        """Return the place of the copy of a tail."""
        number = m * self.conv.kernel[0] + row
        return bind(self.images * self.image + number * (amx.STEPS * _INS))

    def _place(self, m: tirx.PrimExpr, row: tirx.PrimExpr) -> tirx.PrimExpr:
        """Return the place of the pairs that the first row of an image reads at a row of the
        kernel."""
        j, y = self.rows.place(self.rows.axis.phases[0], row)
        return bind(m * self.image + (j * self.plane + y * (self.pitch // 2)) * _INS)

    def _copy_tails(self, chunk: _Chunk, packed: tirx.Buffer) -> None:
        """Emit the copies of the pairs after the last whole tile, with zeros after them: what
        follows in memory are elements that other rows of the kernel read, which 0 may not be
        multiplied by."""
        if not self._has_tails:
            return
        size, vectors = bind(chunk.lines * self.pitch), self.vectors
        whole = bind(size // _ELEMENTS * amx.STEPS)
        left = bind(size // 2 - whole)
        with b.serial(0, chunk.images) as m, b.serial(0, self.conv.kernel[0]) as row:
            source, target = self._place(m, row), self._tail(m, row)
            with b.serial(0, amx.STEPS) as p, b.serial(0, _INS // vectors.lanes) as v:
                at = bind(p * _INS + v * vectors.lanes)
                exists = bind(tirx.Select(p < left, const(vectors.lanes), const(0)))
                vector = vectors.load(packed, bind(source + whole * _INS + at), exists)
                vectors.store(packed, target + at, vector)

    def _add(
        self, chunk: _Chunk, grads: tuple, packed: tirx.Buffer, sums: tuple, row: tirx.PrimExpr
    ) -> None:
        """Emit the product of a tap for a block of output and of input channels."""
        (total, at), (buffer, start) = sums, grads
        size = bind(chunk.lines * self.pitch)
        whole = bind(size // _ELEMENTS)
        tail = bind(ceil_div(size, _ELEMENTS) - whole)
        b.either(
            chunk.is_first,
            lambda: amx.clear(total, start=at),
            lambda: amx.load(total, start=at),
        )
        with b.serial(0, chunk.images) as m, b.serial(0, 2 if self._has_tails else 1) as part:
            place, steps, first = self._place(m, row), whole, bind(start + m * self.depth)
            if self._has_tails:
                is_tail = tirx.EQ(part, const(1))
                place = bind(tirx.Select(is_tail, self._tail(m, row), place))
                steps = bind(tirx.Select(is_tail, tail, whole))
                first = bind(first + part * whole * _ELEMENTS)
            grad = buffer, first, 2 * self.row
            amx.add(total, grad, (packed, place, 4 * _INS), steps, start=at)
        amx.store(total, start=at)

    def _finish(
        self,
        sums: tirx.Buffer,
        block: tirx.PrimExpr,
        dw: Tensor,
        group: tirx.PrimExpr,
        blocks: tuple,
    ) -> None:
        """Emit the copy of the sums of a block of channels to dW."""
        i, o = blocks
        lanes, taps = self.vectors.lanes, self.taps
        outs = bind(tirx.min(const(_OUTS), const(self.outs) - o * _OUTS))
        kept = b.scratch(ceil_div(taps, lanes) * lanes * lanes)
        with b.serial(0, outs) as r:
            channel = bind((group * self.outs + o * _OUTS + r) * self.ins)
            with b.serial(0, _INS // lanes) as half:
                first = bind(i * _INS + half * lanes)
                with b.when(first < self.ins):
                    with b.serial(0, taps) as tap:
                        at = block + tap * amx.SIZE + r * amx.COLUMNS + half * lanes
                        vector = self.vectors.load(sums, bind(at))
                        self.vectors.store(kept, tap * lanes, vector)
                    target = bind((channel + first) * taps)

                    def write(channels: int, target: tirx.PrimExpr = target) -> None:
                        source = kept, const(0)
                        channels_of_taps(self.vectors, source, taps, channels, (dw, target))

                    number = bind(i * (_INS // lanes) + half)
                    whole_or_rest(number, self.ins, lanes, write)


def _ramp(base: tirx.PrimExpr, own: tirx.Ramp) -> tirx.PrimExpr:
    return tirx.Ramp(base, const(1), int(own.lanes))


def _pairs(lines: tirx.Buffer, at: tirx.PrimExpr, lanes: int) -> tirx.PrimExpr:
    """Return consecutive pairs of elements."""
    return bind(tirx.reinterpret(f"float32x{lanes}", lines[tirx.Ramp(at, const(1), 2 * lanes)]))


def _copy_bits(
    target: tirx.Buffer,
    at: tirx.PrimExpr,
    source: tirx.Buffer,
    start: tirx.PrimExpr,
    number: Extent,
) -> None:
    """Emit the copy of consecutive elements of 16 bits."""
    b.copy(target, at, source, start, number)
