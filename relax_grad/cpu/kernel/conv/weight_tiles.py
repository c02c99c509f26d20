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

from ..language import amx
from ..language import builder as b
from ..language.builder import Extent, Vectors, as_expr, bind, ceil_div, const
from ..language.halves import Half, Tensor
from ..language.statements import Emit
from ..matmul.pairs import only_first
from ._amx_lines import elements_of
from ._channels_last import channels_of_taps
from ._chunks import share, unless_empty, whole_or_rest
from ._tiles_plan import INS, OUTS, STEP, WeightTilesPlan


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
    plan : WeightTilesPlan
        The plan of the weight gradient.
    """

    def __init__(self, plan: WeightTilesPlan):
        self.plan, self.conv, self.vectors = plan, plan.conv, Vectors(plan.lanes)
        self.rows, self.columns = plan.rows, plan.columns
        self.height, self.width = plan.conv.out_size

    def emit(self, dy: Half, x: Half, dw: Tensor) -> None:
        """Emit the kernel."""
        size = b.count(self.conv.weight_shape)
        unless_empty(self.conv.batch, dw, size, self.vectors, lambda: self._divided(dy, x, dw))

    def _divided(self, dy: Half, x: Half, dw: Tensor) -> None:
        """Emit the loop over threads, each with a range of input and of output channels."""
        conv, (by_in, by_out) = self.conv, self.plan.parts
        each_in, each_out = (
            ceil_div(self.plan.in_blocks, by_in),
            ceil_div(self.plan.out_blocks, by_out),
        )
        with b.parallel(0, conv.groups * by_in * by_out) as part:
            group = bind(part // (by_in * by_out)) if conv.groups > 1 else const(0)
            ins = share(bind(part // by_out % by_in), by_in, self.plan.in_blocks)
            outs = share(bind(part % by_out), by_out, self.plan.out_blocks)
            sums = b.scratch(each_in * each_out * self.plan.taps * amx.SIZE)
            grads = b.scratch(each_out * OUTS * self.plan.row + STEP, "uint16")
            rows = len(self.rows.remainders) * self.plan.reads * len(self.columns.remainders)
            lines = b.scratch(self.plan.images * rows * INS * self.plan.line, "uint16")
            tails = self.plan.images * conv.kernel[0] * (amx.STEPS * INS)
            packed = b.scratch(self.plan.images * self.plan.image + tails)
            buffers = (grads, lines, packed, sums)
            with amx.tiles():
                self._each_chunk(
                    lambda chunk: self._chunk(
                        chunk, dy, x, dw=dw, buffers=buffers, channels=(group, ins, outs)
                    )
                )

    def _each_chunk(self, emit: Emit) -> None:
        down = ceil_div(self.height, self.plan.task_rows)
        blocks = bind(as_expr(ceil_div(self.conv.batch, self.plan.images)))
        with b.serial(0, blocks) as i, b.serial(0, down) as j:
            image, row = bind(i * self.plan.images), bind(j * self.plan.task_rows)
            images = bind(tirx.min(const(self.plan.images), as_expr(self.conv.batch) - image))
            lines = bind(tirx.min(const(self.plan.task_rows), const(self.height) - row))
            first = tirx.all(tirx.EQ(i, const(0)), tirx.EQ(j, const(0)))
            last = tirx.all(tirx.EQ(i, blocks - 1), tirx.EQ(j, const(down - 1)))
            emit(_Chunk(image, images, row, lines=lines, is_first=bind(first), is_last=bind(last)))

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
                    at = bind((block * self.plan.taps + tap) * amx.SIZE)
                    rows = bind((o - outs[0]) * (OUTS * self.plan.row))
                    self._add(chunk, (grads, rows), packed, (sums, at), row)
            with b.when(chunk.is_last), b.serial(*outs) as o:
                block = bind(((i - ins[0]) * number + o - outs[0]) * (self.plan.taps * amx.SIZE))
                self._finish(sums, block, dw, group, (i, o))

    def _copy_grads(
        self, chunk: _Chunk, dy: Half, grads: tirx.Buffer, group: tirx.PrimExpr, outs: tuple
    ) -> None:
        """Emit the copy of dY as ``[channel][image][row][column]``, with zeros to whole tiles, and
        in place of channels that do not exist."""
        plane, lanes = self.height * self.width, self.vectors.lanes
        size, own = bind(chunk.lines * self.plan.pitch), tirx.Ramp(const(0), const(1), 2 * lanes)
        zero = tirx.Broadcast(tirx.const(0, "uint16"), 2 * lanes)
        last = bind(tirx.min(outs[1] * OUTS, const(self.plan.outs)))
        with b.serial(bind(outs[0] * OUTS), bind(outs[1] * OUTS)) as o:
            start = bind((o - outs[0] * OUTS) * self.plan.row)

            def clear(start: tirx.PrimExpr = start) -> None:
                b.clear(grads, start, self.plan.row)

            def copy(o: tirx.PrimExpr = o, start: tirx.PrimExpr = start) -> None:
                with b.serial(0, chunk.images) as m:
                    channel = (
                        (chunk.image + m) * self.conv.out_channels + group * self.plan.outs + o
                    )
                    here = bind(channel * plane + chunk.row * self.width)
                    to = bind(start + m * self.plan.depth)
                    # The last tile; its elements are written again.
                    tail = bind(size // STEP * STEP)
                    T.buffer_store(grads, zero, [_ramp(to + tail, own)])
                    if self.plan.pitch == self.width:
                        _copy_bits(grads, to, dy.raw, here, size)
                        return
                    with b.serial(0, chunk.lines) as y:
                        at = bind(to + y * self.plan.pitch)
                        _copy_bits(grads, at, dy.raw, bind(here + y * self.width), self.width)
                        b.store(grads, at + self.width, tirx.const(0, "uint16"))

            if self.plan.outs % OUTS:
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
        length = self.plan.pitch + columns.span - 1
        with b.serial(0, chunk.images) as m, b.serial(0, len(rows.remainders)) as j:
            down = rows.remainder(j)
            with b.serial(0, bind(chunk.lines + rows.span - 1)) as y:
                line = bind((chunk.row + y + rows.floors[0]) * rows.axis.step + down)
                row = bind((m * len(rows.remainders) + j) * self.plan.reads + y)
                for k, across in enumerate(columns.remainders):
                    block = row * len(columns.remainders) + k
                    with b.serial(0, INS) as c:
                        to = bind((block * INS + c) * self.plan.line)
                        channel = bind(i * INS + c)
                        plane = (
                            (chunk.image + m) * conv.in_channels + group * self.plan.ins + channel
                        )
                        here = bind(plane * stored + line * (rows.axis.apart * columns.axis.stored))
                        inside = [line >= 0, line < rows.axis.source]
                        if self.plan.ins % INS:
                            inside.append(channel < self.plan.ins)

                        def copy(
                            to: tirx.PrimExpr = to, here: tirx.PrimExpr = here, across: int = across
                        ) -> None:
                            self._copy_line(x, here, lines, to=to, remainder=across, length=length)

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
        pairs, rows = self.plan.pitch // 2, len(self.rows.remainders)
        remainder, x = columns.place(columns.axis.phases[0], column)
        number = bind(chunk.lines + self.rows.span - 1)
        with b.serial(0, chunk.images) as m, b.serial(0, rows) as j, b.serial(0, number) as y:
            row = bind((m * rows + j) * self.plan.reads + y)
            block = bind((row * len(columns.remainders) + remainder) * INS)
            target = bind(m * self.plan.image + (j * self.plan.plane + y * pairs) * INS)
            with b.serial(0, INS // lanes) as half:

                def square(
                    first: tirx.PrimExpr,
                    size: int,
                    half: tirx.PrimExpr = half,
                    block: tirx.PrimExpr = block,
                    target: tirx.PrimExpr = target,
                ) -> None:
                    at = bind(x + 2 * first)
                    channels = [
                        _pairs(lines, bind((block + half * lanes + c) * self.plan.line + at), lanes)
                        for c in range(lanes)
                    ]
                    for p, vector in enumerate(vectors.transpose(channels)[:size]):
                        place = bind(target + (first + p) * INS + half * lanes)
                        vectors.store(packed, place, vector)

                if pairs >= lanes:
                    with b.serial(0, pairs // lanes) as k:
                        square(bind(k * lanes), lanes)
                if pairs % lanes:
                    square(const(pairs // lanes * lanes), pairs % lanes)
                if self.width % 2:
                    # A window beyond the last one would read the other element.
                    last = bind(target + (pairs - 1) * INS + half * lanes)
                    vectors.store(packed, last, only_first(vectors.load(packed, last)))

    def _tail(self, m: tirx.PrimExpr, row: tirx.PrimExpr) -> tirx.PrimExpr:
        """Return the place of the copy of a tail."""
        number = m * self.conv.kernel[0] + row
        return bind(self.plan.images * self.plan.image + number * (amx.STEPS * INS))

    def _place(self, m: tirx.PrimExpr, row: tirx.PrimExpr) -> tirx.PrimExpr:
        """Return the place of the pairs that the first row of an image reads at a row of the
        kernel."""
        j, y = self.rows.place(self.rows.axis.phases[0], row)
        return bind(m * self.plan.image + (j * self.plan.plane + y * (self.plan.pitch // 2)) * INS)

    def _copy_tails(self, chunk: _Chunk, packed: tirx.Buffer) -> None:
        """Emit the copies of the pairs after the last whole tile, with zeros after them: what
        follows in memory are elements that other rows of the kernel read, which 0 may not be
        multiplied by."""
        if not self.plan.has_tails:
            return
        size, vectors = bind(chunk.lines * self.plan.pitch), self.vectors
        whole = bind(size // STEP * amx.STEPS)
        left = bind(size // 2 - whole)
        with b.serial(0, chunk.images) as m, b.serial(0, self.conv.kernel[0]) as row:
            source, target = self._place(m, row), self._tail(m, row)
            with b.serial(0, amx.STEPS) as p, b.serial(0, INS // vectors.lanes) as v:
                at = bind(p * INS + v * vectors.lanes)
                exists = bind(tirx.Select(p < left, const(vectors.lanes), const(0)))
                vector = vectors.load(packed, bind(source + whole * INS + at), exists)
                vectors.store(packed, target + at, vector)

    def _add(
        self, chunk: _Chunk, grads: tuple, packed: tirx.Buffer, sums: tuple, row: tirx.PrimExpr
    ) -> None:
        """Emit the product of a tap for a block of output and of input channels."""
        (total, at), (buffer, start) = sums, grads
        size = bind(chunk.lines * self.plan.pitch)
        whole = bind(size // STEP)
        tail = bind(ceil_div(size, STEP) - whole)
        b.either(
            chunk.is_first,
            lambda: amx.clear(total, start=at),
            lambda: amx.load(total, start=at),
        )
        with b.serial(0, chunk.images) as m, b.serial(0, 2 if self.plan.has_tails else 1) as part:
            place, steps, first = self._place(m, row), whole, bind(start + m * self.plan.depth)
            if self.plan.has_tails:
                is_tail = tirx.EQ(part, const(1))
                place = bind(tirx.Select(is_tail, self._tail(m, row), place))
                steps = bind(tirx.Select(is_tail, tail, whole))
                first = bind(first + part * whole * STEP)
            grad = buffer, first, 2 * self.plan.row
            amx.add(total, grad, (packed, place, 4 * INS), steps, start=at)
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
        lanes, taps = self.vectors.lanes, self.plan.taps
        outs = bind(tirx.min(const(OUTS), const(self.plan.outs) - o * OUTS))
        kept = b.scratch(ceil_div(taps, lanes) * lanes * lanes)
        with b.serial(0, outs) as r:
            channel = bind((group * self.plan.outs + o * OUTS + r) * self.plan.ins)
            with b.serial(0, INS // lanes) as half:
                first = bind(i * INS + half * lanes)
                with b.when(first < self.plan.ins):
                    with b.serial(0, taps) as tap:
                        at = block + tap * amx.SIZE + r * amx.COLUMNS + half * lanes
                        vector = self.vectors.load(sums, bind(at))
                        self.vectors.store(kept, tap * lanes, vector)
                    target = bind((channel + first) * taps)

                    def write(channels: int, target: tirx.PrimExpr = target) -> None:
                        source = kept, const(0)
                        channels_of_taps(self.vectors, source, taps, channels, (dw, target))

                    number = bind(i * (INS // lanes) + half)
                    whole_or_rest(number, self.plan.ins, lanes, write)


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
