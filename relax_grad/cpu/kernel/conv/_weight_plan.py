"""Plans of the weight gradient of convolutions by vectors: of input channels, or of output
channels if there are few input channels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ...target import CPU
from ..language.builder import Extent, ceil_div
from ..language.plans import Plan
from ._chunks import Chunks, grid
from .geometry import ONE, Conv2d, Windows

#: The maximum number of columns of joined rows.
_COLUMNS = 1024

#: The number of columns that the body of a loop processes.
_UNROLL = 2

#: The maximum number of taps in a row of the kernel, over all input channels, of a tile of vectors
#: of output channels; with more, the code is too long.
_MOST_TAPS = 64


@dataclass(frozen=True)
class Tile:
    """A tile of sums in registers: its output channels, kernel columns, and vectors of input
    channels."""

    outs: int
    columns: int
    vectors: int

    @staticmethod
    def of(conv: Conv2d, cpu: CPU) -> Tile:
        """Return the largest tile that fits in the registers together with its operands."""
        ins, outs = conv.in_channels // conv.groups, conv.out_channels // conv.groups
        vectors = 2 if conv.width.kernel == 1 and ins > cpu.lanes else 1
        groups = ceil_div(conv.width.kernel, 7 if cpu.registers >= 32 else 3)
        columns = ceil_div(conv.width.kernel, groups)
        # Other registers hold a splat and the vector that it multiplies; LLVM spills without a few
        # more.
        free = cpu.registers - (4 if cpu.registers >= 32 else 1)
        most = free // (columns * vectors) - 1
        return Tile(_even(outs, most), columns, vectors)


def _even(count: int, most: int) -> int:
    """Return a block size of at most ``most`` such that the last block is not much smaller."""
    for size in range(min(most, count), most * 3 // 4, -1):
        if count % size == 0:
            return size
    return ceil_div(count, ceil_div(count, most))


@dataclass(frozen=True)
class WeightPlan(Plan):
    """The plan of a weight gradient whose lanes are input channels.

    Attributes
    ----------
    conv : Conv2d
        The convolution of images or of slices, whose rows may be joined.
    depth : Windows
        The axis along which the results of slices are added.
    lanes : int
        The elements of a vector.
    tile : Tile
        The sums in registers.
    unroll : int
        The columns that the body of a loop processes; of pairs, twice as many.
    chunks : Chunks
        The images and rows whose elements of X are copied at once.
    parts : tuple[int, int]
        The ranges of blocks of input and of output channels, for the threads.
    """

    conv: Conv2d
    depth: Windows
    lanes: int
    tile: Tile
    unroll: int
    chunks: Chunks
    parts: tuple[int, int]

    @property
    def ins(self) -> int:
        """The input channels of a group."""
        return self.conv.in_channels // self.conv.groups

    @property
    def outs(self) -> int:
        """The output channels of a group."""
        return self.conv.out_channels // self.conv.groups

    @property
    def taps(self) -> int:
        """The taps along all axes."""
        return self.depth.kernel * self.conv.height.kernel * self.conv.width.kernel

    @property
    def in_vectors(self) -> int:
        """The vectors of input channels of a group."""
        return ceil_div(self.ins, self.lanes)

    @property
    def in_blocks(self) -> int:
        """The blocks of input channels of a group."""
        return ceil_div(self.in_vectors, self.tile.vectors)

    @property
    def out_blocks(self) -> int:
        """The blocks of output channels of a group."""
        return ceil_div(self.outs, self.tile.outs)

    @cached_property
    def columns(self) -> int:
        """The columns of a copied row of X."""
        return self.conv.width.span(self.conv.width.number)

    @cached_property
    def is_at_once(self) -> bool:
        """Whether a tile computes its sums completely, from the first term to the last."""
        return self.chunks.is_one and self.depth.kernel == 1

    @cached_property
    def span(self) -> int:
        """The rows of X of a chunk."""
        return self.conv.height.span(self.chunks.rows)

    def lines(self) -> dict[str, str]:
        """Return the decisions and their values as text."""
        tile, (by_in, by_out) = self.tile, self.parts
        return {
            "tile": f"{tile.outs} output channels x {tile.columns} columns of the kernel x "
            f"{tile.vectors} vectors of input channels",
            "chunk": self.chunks.as_text(),
            "sums": "complete after a tile" if self.is_at_once else "kept from chunk to chunk",
            "threads share": f"{self.conv.groups} groups, {self.in_blocks} blocks of input "
            f"channels in {by_in} parts, {self.out_blocks} of output channels in {by_out}",
        }


def joined(conv: Conv2d) -> Conv2d:
    """Return the convolution with its rows joined, if every window is a single element."""
    return conv.with_rows_of(_COLUMNS)


def weight_plan(conv: Conv2d, cpu: CPU, depth: Windows = ONE) -> WeightPlan:
    """Return the plan of a weight gradient; with a depth, of volumes."""
    conv = joined(conv)
    tile = Tile.of(conv, cpu)
    row = 4 * cpu.lanes * tile.vectors * conv.width.span(conv.width.number)
    chunks = Chunks.of_bytes(
        conv.batch * depth.number,
        conv.height.number,
        lambda rows: row * conv.height.span(rows),
        cpu.tuning.convolutions.weight_chunk,
    )
    ins, outs = conv.in_channels // conv.groups, conv.out_channels // conv.groups
    blocks = ceil_div(ceil_div(ins, cpu.lanes), tile.vectors), ceil_div(outs, tile.outs)
    # Copying a block of X costs about as much as a tile of a 3x3 kernel.
    parts = grid(blocks, ceil_div(cpu.cores, conv.groups), copy=0.5)
    return WeightPlan(conv, depth, cpu.lanes, tile=tile, unroll=_UNROLL, chunks=chunks, parts=parts)


@dataclass(frozen=True)
class StemPlan(Plan):
    """The plan of a weight gradient whose lanes are output channels, of one group.

    Attributes
    ----------
    conv : Conv2d
        The convolution.
    lanes : int
        The elements of a vector.
    tile_vectors : int
        The vectors of output channels of a tile.
    tile_taps : int
        The taps of a tile, of one row of the kernel and all input channels.
    chunks : Chunks
        The images and rows whose elements of dY are copied at once.
    parts : tuple[int, int]
        The ranges of blocks of output channels and of rows of the kernel, for the threads.
    """

    conv: Conv2d
    lanes: int
    tile_vectors: int
    tile_taps: int
    chunks: Chunks
    parts: tuple[int, int]

    @property
    def out_vectors(self) -> int:
        """The vectors of output channels."""
        return ceil_div(self.conv.out_channels, self.lanes)

    @property
    def blocks(self) -> int:
        """The blocks of output channels."""
        return ceil_div(self.out_vectors, self.tile_vectors)

    @cached_property
    def taps(self) -> list[tuple[int, int]]:
        """The input channel and the column of each tap of a row of the kernel."""
        conv = self.conv
        return [(c, k) for c in range(conv.in_channels) for k in range(conv.width.kernel)]

    @property
    def groups(self) -> list[list[tuple[int, int]]]:
        """The taps of each tile."""
        starts = range(0, len(self.taps), self.tile_taps)
        return [self.taps[i : i + self.tile_taps] for i in starts]

    @property
    def pitch(self) -> int:
        """The columns of a copied row of X."""
        width = self.conv.width
        return (width.number - 1) * width.stride + 1 + (width.kernel - 1) * width.dilation

    def rows_read(self, rows: Extent) -> Extent:
        """Return the rows of X that some rows of dY are multiplied by."""
        height = self.conv.height
        return (rows - 1) * height.stride + (height.kernel - 1) * height.dilation + 1

    def lines(self) -> dict[str, str]:
        """Return the decisions and their values as text."""
        by_out, by_row = self.parts
        return {
            "tile": f"{self.tile_taps} taps x {self.tile_vectors} vectors of output channels",
            "chunk": self.chunks.as_text(),
            "threads share": f"{self.blocks} blocks of output channels in {by_out} parts, "
            f"{self.conv.height.kernel} rows of the kernel in {by_row}",
        }


def stem_plan(conv: Conv2d, cpu: CPU) -> StemPlan:
    """Return the plan of a weight gradient with few input channels."""
    vectors = min(2, ceil_div(conv.out_channels, cpu.lanes))
    taps = conv.in_channels * conv.width.kernel
    most = (24 if cpu.registers >= 32 else 10) // vectors
    row = 4 * cpu.lanes * vectors * conv.width.number
    most_bytes = cpu.tuning.convolutions.stem_chunk
    chunks = Chunks.of_bytes(conv.batch, conv.height.number, lambda rows: row * rows, most_bytes)
    by_out = min(ceil_div(ceil_div(conv.out_channels, cpu.lanes), vectors), cpu.cores)
    by_row = min(conv.height.kernel, max(1, cpu.cores // by_out))
    tile_taps = ceil_div(taps, ceil_div(taps, most))
    return StemPlan(
        conv, cpu.lanes, vectors, tile_taps=tile_taps, chunks=chunks, parts=(by_out, by_row)
    )


def stem_is_faster(conv: Conv2d, cpu: CPU) -> bool:
    """Tell whether vectors of output channels are fewer than vectors of input channels."""
    outs, lanes = conv.out_channels, cpu.lanes
    here = conv.in_channels * ceil_div(outs, lanes)
    there = ceil_div(conv.in_channels, lanes) * outs
    few = conv.in_channels * conv.width.kernel <= _MOST_TAPS
    return conv.groups == 1 and few and 1.2 * here < there
