"""Convolutions and data gradients with few target channels in a group: grouped ones, and a stem's
data gradient.

In :mod:`.direct`, the lanes of a vector are channels of the target. Here, they are columns:
neighbours of one phase, which read neighbours of the source (:mod:`.gathering`). Rows of the source
are copied with their zero padding. A tile holds the sums of all phases of the columns, for some
channels, and for some vectors of a row or some rows. Each step loads vectors of the source, and
broadcasts an element of the weight for every channel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tvm import tirx

from ...target import CPU
from ..language import builder as b
from ..language.builder import Accumulators, Extent, Vectors, bind, const
from ..language.halves import Tensor
from ..language.stealing import shared
from ._channels_last import pad_rows
from ._few_channels_plan import FewChannelsPlan, few_channels_plan
from .gathering import Gathering, Taps
from .geometry import Conv2d, Windows


def conv_few_channels(
    conv: Conv2d, cpu: CPU, shapes: Sequence[Sequence[Extent]] | None = None
) -> tirx.PrimFunc:
    """Return the kernel of a convolution: a function of data, weight and result (float32).

    Parameters
    ----------
    conv : Conv2d
        The convolution; :func:`._few_channels_plan.is_supported` holds for its
        :class:`.Gathering`.
    cpu : CPU
        The target CPU.
    shapes : Sequence, optional
        The shapes of the parameters, if they differ from ``conv``'s.
    """
    shapes = shapes or (conv.data_shape, conv.weight_shape, conv.out_shape)
    params = b.floats(("data", "weight", "result"), shapes)
    generator = _Generator(few_channels_plan(Gathering.forward(conv), cpu))
    return b.prim_func("conv_few_channels", params, generator.emit)


def conv_few_channels_backward_data(
    conv: Conv2d, cpu: CPU, shapes: Sequence[Sequence[Extent]] | None = None
) -> tirx.PrimFunc:
    """Return the kernel of the data gradient: a function of output gradient, weight and data
    gradient (float32).

    Parameters as for :func:`conv_few_channels`.
    """
    shapes = shapes or (conv.out_shape, conv.weight_shape, conv.data_shape)
    params = b.floats(("output_grad", "weight", "data_grad"), shapes)
    generator = _Generator(few_channels_plan(Gathering.backward(conv), cpu))
    return b.prim_func("conv_few_channels_backward_data", params, generator.emit)


class _Generator:
    def __init__(self, plan: FewChannelsPlan):
        self.plan, self.g, self.vectors = plan, plan.gathering, Vectors(plan.lanes)
        self.rows, self.columns = self.g.rows, self.g.columns

    def emit(self, source: Tensor, weight: Tensor, target: Tensor) -> None:
        """Emit the tasks; each computes some rows of an image, for one group of channels."""
        g, phases = self.g, len(self.rows.phases)
        with shared(self.plan.tasks, self.plan.cores) as task:
            image = bind(task // self.plan.row_blocks)
            row = bind(task % self.plan.row_blocks * self.plan.block_rows)
            height = bind(
                tirx.min(const(self.plan.block_rows * phases), self.rows.target - row * phases)
            )
            plane = self.plan.rows_read * self.plan.pitch
            copy = b.scratch(g.sources * plane + self.plan.lanes)
            self._copy(source, image, row, height, (copy, plane))
            weights = bind(image % g.groups * (g.targets * g.sources * g.taps))
            memory = _Memory(copy, plane, weight, weights, target)
            for phase, down in enumerate(self.rows.phases):
                number = bind((height + (phases - 1 - phase)) // phases)
                for first in range(0, g.targets, self.plan.channels):
                    channels = range(first, min(first + self.plan.channels, g.targets))
                    self._lines(memory, (image, row * phases + phase, number), down, channels)

    def _copy(
        self,
        source: Tensor,
        image: tirx.PrimExpr,
        row: tirx.PrimExpr,
        height: tirx.PrimExpr,
        copy: tuple[tirx.Buffer, int],
    ) -> None:
        """Copy the rows of the source that are read, with their zero padding."""
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
                source=(source, start),
                rows=(first, needed),
                target=(buffer, bind(r * plane), self.plan.pitch),
            )

    def _lines(self, memory: _Memory, lines: tuple, down: Taps, channels: range) -> None:
        """Emit rows of a phase, ``tile_rows`` at a time, for some channels.

        ``lines`` is a tuple of the image, the first row, and the number of rows.
        """
        (image, line, number), size = lines, self.plan.tile_rows
        phases = len(self.rows.phases)

        def some(i: tirx.PrimExpr, rows: int) -> None:
            read = bind(
                (i * self.rows.step + (down.offset - self.rows.offsets[0])) * self.plan.pitch
            )
            plane = self.rows.target * self.columns.target
            write = bind(
                (image * self.g.targets + channels.start) * plane
                + (line + i * phases) * self.columns.target
            )
            self._row(
                memory,
                _Part(
                    rows,
                    self.plan.row_vectors,
                    None,
                    channels=channels,
                    down=down,
                    read=read,
                    write=write,
                ),
            )

        with b.serial(0, number // size) as i:
            some(bind(i * size), size)
        if size > 1 and self.rows.count() % self.plan.block_rows:
            with b.serial(number // size * size, number) as i:
                some(i, 1)

    def _row(self, memory: _Memory, row: _Part) -> None:
        """Emit the tiles of a row; the last vector of the last tile may be partial."""
        lanes, size, phases = self.plan.lanes, self.plan.tile_vectors, len(self.columns.phases)
        is_whole = self.columns.target % (lanes * phases) == 0
        whole = (self.plan.row_vectors - (not is_whole)) // size

        def tile(first: tirx.PrimExpr, vectors: int, left: int | None) -> None:
            write, read = bind(row.write + first * (phases * lanes)), bind(row.read + first * lanes)
            self._tile(memory, replace(row, vectors=vectors, left=left, read=read, write=write))

        if whole:
            with b.serial(0, whole) as j:
                tile(bind(j * size), size, None)
        rest = self.plan.row_vectors - whole * size
        if rest:
            last = (self.plan.row_vectors - 1) * lanes * phases
            tile(const(whole * size), rest, self.columns.target - last)

    def _tile(self, memory: _Memory, tile: _Part) -> None:
        """Emit the sums of a tile, and store them."""
        g, down = self.g, tile.down
        sums = _Sums(self.vectors, len(self.columns.phases), tile)
        taps = self._taps_by_offset()
        source_step = g.targets * g.taps if g.source_major else g.taps
        with b.serial(0, down.number) as p, b.serial(0, g.sources) as r:
            here = bind(tile.read + p * (down.move * self.plan.pitch) + r * memory.plane)
            line = (down.first + p * down.step) * g.kernel[2]
            last = g.taps - 1 - line if g.source_major else line
            tap = bind(memory.base + r * source_step + last)
            for offset in sorted(taps):
                at = here, offset - self.columns.offsets[0]
                self._add_products(memory, sums, at, tap, taps[offset])
        self._store(memory, sums)

    def _taps_by_offset(self) -> dict[int, list]:
        """Return the taps for each column offset, as pairs of a phase and a column of the
        kernel."""
        taps: dict[int, list] = {}
        for phase, across in enumerate(self.columns.phases):
            for q, offset in enumerate(across.offsets):
                taps.setdefault(offset, []).append((phase, across.first + q * across.step))
        return taps

    def _add_products(
        self, memory: _Memory, sums: _Sums, at: tuple, tap: tirx.PrimExpr, taps: list
    ) -> None:
        """Add the products of the taps of one offset; ``at`` is the start of the read row, and the
        offset from it."""
        (here, shift), g, lanes = at, self.g, self.plan.lanes
        target_step = g.taps if g.source_major else g.sources * g.taps
        row = self.rows.step * self.plan.pitch
        data = {
            (i, v): bind(self.vectors.load(memory.copy, here + (i * row + shift + v * lanes)))
            for i, v in sums.places
        }
        for phase, column in taps:
            for c in sums.tile.channels:
                place = tap + (c * target_step + (-column if g.source_major else column))
                value = bind(self.vectors.splat(memory.weight[place]))
                for i, v in sums.places:
                    sums.add((phase, c, i, v), value * data[i, v])

    def _store(self, memory: _Memory, sums: _Sums) -> None:
        """Store the sums of a tile."""
        tile, plane = sums.tile, self.rows.target * self.columns.target
        phases = range(len(self.columns.phases))
        for c in tile.channels:
            for i, v in sums.places:
                start = (c - tile.channels.start) * plane + i * self.columns.target
                offset = start + v * (self.plan.lanes * len(phases))
                left = tile.left if v == tile.vectors - 1 else None
                vectors = [sums[phase, c, i, v] for phase in phases]
                self._store_columns(memory.target, (tile.write, offset), vectors, left)

    def _store_columns(self, target: Tensor, at: tuple, sums: Sequence, left: int | None) -> None:
        """Store the sums of all phases of neighbouring columns: all of them, or the first ``left``
        columns."""
        start, offset = at
        if len(sums) == 1:
            self.vectors.store(target, start + offset, sums[0], left)
            return
        for half, vector in enumerate(self.vectors.interleave(list(map(bind, sums)))):
            number = None if left is None else left - half * self.plan.lanes
            if number is None or number > 0:
                self.vectors.store(
                    target, start + (offset + half * self.plan.lanes), vector, number
                )


@dataclass(frozen=True)
class _Memory:
    """The buffers that a task reads and writes.

    Attributes
    ----------
    copy : tirx.Buffer
        The copied rows of the source.
    plane : int
        The stride of the channels in it.
    weight : tirx.Buffer
        The weight.
    base : tirx.PrimExpr
        The offset of the group's weight.
    target : tirx.Buffer
        The result.
    """

    copy: tirx.Buffer
    plane: int
    weight: tirx.Buffer
    base: tirx.PrimExpr
    target: tirx.Buffer


@dataclass(frozen=True)
class _Part:
    """Some rows of a phase, or a tile of them, for some channels of the target.

    Attributes
    ----------
    rows, vectors : int
        The number of rows, and of vectors in a row.
    left : int or None
        The number of elements in the last vector of each row, if it is partial.
    channels : range
        The channels.
    down : Taps
        The taps along the rows.
    read, write : tirx.PrimExpr
        The offset of the first row in the copied source, and in the target.
    """

    rows: int
    vectors: int
    left: int | None
    channels: range
    down: Taps
    read: tirx.PrimExpr
    write: tirx.PrimExpr


class _Sums:
    """The sums of a tile: a vector for each phase of the columns, channel, row, and vector of a
    row."""

    def __init__(self, vectors: Vectors, phases: int, tile: _Part):
        self.tile = tile
        self.places = [(i, v) for i in range(tile.rows) for v in range(tile.vectors)]
        cells = [
            (phase, c, *at) for phase in range(phases) for c in tile.channels for at in self.places
        ]
        self._index = {cell: i for i, cell in enumerate(cells)}
        self._total = Accumulators(vectors, len(cells))
        for i in range(len(cells)):
            self._total[i] = vectors.splat(0)

    def __getitem__(self, cell: tuple) -> tirx.PrimExpr:
        return self._total[self._index[cell]]

    def add(self, cell: tuple, value: tirx.PrimExpr) -> None:
        """Emit the addition to a sum."""
        i = self._index[cell]
        self._total[i] = self._total[i] + value
