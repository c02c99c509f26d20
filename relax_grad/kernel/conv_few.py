"""Convolutions and data gradients whose target has few channels in a group, as grouped ones and that of a stem have.

Where :mod:`.conv` has channels of the target in a vector, here are columns of it: neighbours of one phase, which read
neighbours of the source (:mod:`._gathering`). Rows of the source are copied with the zeros around them; a tile is
the sums of all phases of the columns, for some channels, of some vectors of a row or of some rows. Each step loads
vectors of the source, and broadcasts an element of the weight for every channel.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx

from ..target import CPU
from . import _builder as b
from ._builder import Accumulators, Extent, Vectors, bind, ceil_div, const
from ._convolution import Conv2d, Windows
from ._gathering import Gathering, Taps
from ._pack import pad_rows

#: Bytes of the source that a task copies.
_SOURCE_BYTES = 256 * 1024

#: Multiplications in the body of a loop, beyond which the code is too long.
_MOST_PRODUCTS = 256

#: How much fuller vectors must be than those of channels, for these need less loads.
_FULLER = 1.5


def suits(gathering: Gathering) -> bool:
    """Tell whether neighbours of the target read neighbours of the source, and there is code for all phases."""
    rows, columns = gathering.axes
    if not gathering.is_flat or max(len(rows.phases), len(columns.phases)) > 2:
        return False
    return (columns.step, columns.apart, rows.apart) == (1, 1, 1) and columns.offsets[0] <= 0


def fits(gathering: Gathering, cpu: CPU) -> bool:
    """Tell whether this kernel suits, and its vectors are fuller than vectors of channels."""
    if not suits(gathering):
        return False
    generator = _Generator(gathering, cpu)
    if generator.products > _MOST_PRODUCTS or generator.bytes_of(1) > _SOURCE_BYTES:
        return False
    here, there = gathering.columns.count(), gathering.targets
    return _filled(here, cpu) > _FULLER * _filled(there, cpu)


def conv_few(
    conv: Conv2d, cpu: CPU, shapes: Sequence[Sequence[Extent]] | None = None
) -> tirx.PrimFunc:
    """Return the function of data, weight and result (float32) that computes a convolution.

    Parameters
    ----------
    conv : Conv2d
        The convolution; its :class:`.Gathering` suits.
    cpu : CPU
        What the function is for.
    shapes : Sequence, optional
        The shapes of the parameters, where they are not those of ``conv``.
    """
    shapes = shapes or (conv.data_shape, conv.weight_shape, conv.out_shape)
    params = b.floats(("data", "weight", "result"), shapes)
    return b.prim_func("conv_few", params, _Generator(Gathering.forward(conv), cpu).emit)


def conv_few_backward_data(
    conv: Conv2d, cpu: CPU, shapes: Sequence[Sequence[Extent]] | None = None
) -> tirx.PrimFunc:
    """Return the function of output gradient, weight and data gradient (float32) of a convolution.

    Parameters are those of :func:`conv_few`.
    """
    shapes = shapes or (conv.out_shape, conv.weight_shape, conv.data_shape)
    params = b.floats(("output_grad", "weight", "data_grad"), shapes)
    generator = _Generator(Gathering.backward(conv), cpu)
    return b.prim_func("conv_few_backward_data", params, generator.emit)


def _filled(count: int, cpu: CPU) -> float:
    """Return which part of the lanes of vectors is used for a number of elements."""
    return count / (ceil_div(count, cpu.lanes) * cpu.lanes)


class _Generator:
    """The sizes of a kernel, and what emits it.

    Attributes
    ----------
    row_vectors : int
        The vectors of a row of a phase.
    channels, tile_rows, tile_vectors : int
        The channels, rows and vectors of a row that a tile has.
    products : int
        How many products the body of a loop has.
    pitch, rows_read : int
        The columns of a copied row, and the rows that are copied for a block.
    block_rows : int
        The rows (of a phase) of a block.
    """

    def __init__(self, gathering: Gathering, cpu: CPU):
        self.g, self.cpu, self.vectors = gathering, cpu, Vectors(cpu.lanes)
        self.rows, self.columns = gathering.rows, gathering.columns
        phases = len(self.columns.phases)
        self.row_vectors = ceil_div(self.columns.count(), cpu.lanes)
        # Beside the sums: a vector of the source for each that a tile has, and what multiplies it.
        most = (24 if cpu.registers >= 32 else 10) // phases
        per_row = min(2, self.row_vectors)
        blocks = ceil_div(gathering.targets * per_row, most)
        self.channels = ceil_div(gathering.targets, blocks)
        vectors = max(1, min(most // self.channels, self.row_vectors, 6))
        self.tile_vectors = ceil_div(self.row_vectors, ceil_div(self.row_vectors, vectors))
        self.pitch = (
            self.row_vectors * cpu.lanes + self.columns.offsets[1] - self.columns.offsets[0]
        )
        count = self.rows.count()
        fitting = [n for n in range(1, count + 1) if self.bytes_of(n) <= _SOURCE_BYTES]
        self.block_rows = ceil_div(count, ceil_div(count, max([1, *fitting])))
        self.row_blocks = ceil_div(count, self.block_rows)
        self.rows_read = self.rows.extent(self.block_rows)
        most_rows = 1
        if self.tile_vectors == self.row_vectors and len(self.rows.phases) == 1:
            most_rows = max(1, min(most // (self.channels * self.tile_vectors), 4))
        self.tile_rows = max(n for n in range(1, most_rows + 1) if self.block_rows % n == 0)
        taps = sum(phase.number for phase in self.columns.phases)
        self.products = taps * self.channels * self.tile_vectors * self.tile_rows

    def bytes_of(self, rows: int) -> int:
        """Return how many bytes a block of so many rows copies."""
        return 4 * self.g.sources * self.rows.extent(rows) * self.pitch

    def emit(self, source, weight, target) -> None:
        """Emit the tasks: some rows of an image of a group of channels."""
        g, phases = self.g, len(self.rows.phases)
        with b.parallel(0, g.images * self.row_blocks) as task:
            image = bind(task // self.row_blocks)
            row = bind(task % self.row_blocks * self.block_rows)
            height = bind(
                tirx.min(const(self.block_rows * phases), self.rows.target - row * phases)
            )
            plane = self.rows_read * self.pitch
            copy = b.scratch(g.sources * plane + self.cpu.lanes)
            self._copy(source, image, row, height, (copy, plane))
            weights = bind(image % g.groups * (g.targets * g.sources * g.taps))
            for phase, down in enumerate(self.rows.phases):
                number = bind((height + (phases - 1 - phase)) // phases)
                for first in range(0, g.targets, self.channels):
                    channels = range(first, min(first + self.channels, g.targets))
                    self._lines(
                        (copy, plane),
                        (weight, weights),
                        (target, image, row * phases + phase),
                        number,
                        down,
                        channels,
                    )

    def _copy(self, source, image, row, height, copy) -> None:
        """Copy the rows of the source that are read, with zeros around them."""
        g, (buffer, plane) = self.g, copy
        size = self.rows.source * self.columns.source
        rows, width = (
            Windows(axis.source, 1, 1, max(0, -axis.offsets[0]), 0, 1) for axis in g.axes
        )
        lines = bind((height + (len(self.rows.phases) - 1)) // len(self.rows.phases))
        needed = bind((lines - 1) * self.rows.step + self.rows.extent(1))
        first = bind(row * self.rows.step + self.rows.offsets[0] + rows.before)
        with b.serial(0, g.sources) as r:
            start = bind((image * g.sources + r) * size)
            pad_rows(
                self.vectors,
                rows,
                width,
                (source, start),
                (first, needed),
                (buffer, bind(r * plane), self.pitch),
            )

    def _lines(self, copy, weight, target, number, down: Taps, channels: range) -> None:
        """Emit the rows of a phase, some at a time, for some channels."""
        (buffer, image, line), size = target, self.tile_rows
        phases = len(self.rows.phases)

        def some(i, rows: int) -> None:
            read = bind((i * self.rows.step + (down.offset - self.rows.offsets[0])) * self.pitch)
            plane = self.rows.target * self.columns.target
            out = bind(
                (image * self.g.targets + channels.start) * plane
                + (line + i * phases) * self.columns.target
            )
            self._row(copy, read, weight, (buffer, out, plane), rows, down, channels)

        with b.serial(0, number // size) as i:
            some(bind(i * size), size)
        if size > 1 and self.rows.count() % self.block_rows:
            with b.serial(number // size * size, number) as i:
                some(i, 1)

    def _row(self, copy, read, weight, out, rows: int, down: Taps, channels: range) -> None:
        """Emit the tiles of a row: whole ones, and the last one, whose last vector may not be whole."""
        lanes, size, phases = self.cpu.lanes, self.tile_vectors, len(self.columns.phases)
        is_whole = self.columns.target % (lanes * phases) == 0
        whole = (self.row_vectors - (not is_whole)) // size

        def tile(first, vectors: int, left: int | None) -> None:
            buffer, start, plane = out
            at = bind(start + first * (phases * lanes)), bind(read + first * lanes)
            self._tile(
                copy, weight, (buffer, at[0], plane), at[1], (rows, vectors, left), down, channels
            )

        if whole:
            with b.serial(0, whole) as j:
                tile(bind(j * size), size, None)
        rest = self.row_vectors - whole * size
        if rest:
            last = (self.row_vectors - 1) * lanes * phases
            tile(const(whole * size), rest, self.columns.target - last)

    def _tile(self, copy, weight, out, read, extents, down: Taps, channels: range) -> None:
        """Emit a tile; of its last vector of each row that many elements are left, or all (None)."""
        (buffer, plane), (weights, base), (rows, vectors, left) = copy, weight, extents
        g, lanes, kernel = self.g, self.cpu.lanes, self.g.kernel[2]
        places = [(i, v) for i in range(rows) for v in range(vectors)]
        phases = self.columns.phases
        cells = [(phase, c, at) for phase in range(len(phases)) for c in channels for at in places]
        index = {cell: i for i, cell in enumerate(cells)}
        total = Accumulators(self.vectors, len(cells))
        for i in range(len(cells)):
            total[i] = self.vectors.splat(0)
        # The taps of each offset: their phases and their places in a row of the kernel.
        taps: dict[int, list] = {}
        for phase, across in enumerate(phases):
            for q, offset in enumerate(across.offsets):
                taps.setdefault(offset, []).append((phase, across.first + q * across.step))
        source_step, target_step = g.taps, g.sources * g.taps
        if g.source_major:
            source_step, target_step = g.targets * g.taps, g.taps
        with b.serial(0, down.number) as p, b.serial(0, g.sources) as r:
            here = bind(read + p * (down.move * self.pitch) + r * plane)
            line = (down.first + p * down.step) * kernel
            last = g.taps - 1 - line if g.source_major else line
            tap = bind(base + r * source_step + last)
            for offset in sorted(taps):
                shift = offset - self.columns.offsets[0]
                data = {
                    (i, v): bind(
                        self.vectors.load(
                            buffer, here + (i * self.rows.step * self.pitch + shift + v * lanes)
                        )
                    )
                    for i, v in places
                }
                for phase, column in taps[offset]:
                    for c in channels:
                        at = tap + (c * target_step + (-column if g.source_major else column))
                        value = bind(self.vectors.splat(weights[at]))
                        for place in places:
                            cell = index[phase, c, place]
                            total[cell] = total[cell] + value * data[place]
        for c in channels:
            for i, v in places:
                start = (c - channels.start) * out[2] + i * self.columns.target
                sums = [total[index[phase, c, (i, v)]] for phase in range(len(phases))]
                number = left if v == vectors - 1 else None
                self._store(out, start + v * (lanes * len(phases)), sums, number)

    def _store(self, out, offset, sums: Sequence, left: int | None) -> None:
        """Store the sums of all phases of neighbouring columns, of which that many are left."""
        buffer, start, _ = out
        if len(sums) == 1:
            self.vectors.store(buffer, start + offset, sums[0], left)
            return
        for half, vector in enumerate(self.vectors.interleave(list(map(bind, sums)))):
            number = None if left is None else left - half * self.cpu.lanes
            if number is None or number > 0:
                self.vectors.store(buffer, start + (offset + half * self.cpu.lanes), vector, number)
