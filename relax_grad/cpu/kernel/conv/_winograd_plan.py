"""Plans of convolutions by Winograd's minimal filtering, and of their data gradients."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from ...kernel_limits import Convolutions
from ...target import CPU
from ..language.builder import Extent, ceil_div
from ..language.plans import Plan, extent_as_text
from ._winograd_slices import Slices
from ._winograd_tiles import Squares, apart, balanced
from .gathering import Axis
from .geometry import ONE, Conv2d, Conv3d, Windows

#: Channels that a tile sums over at once.
_DEPTH = 256

#: The most images of a chunk of a symbolic batch.
_MOST_IMAGES = 8


def is_winograd(conv: Conv2d | Conv3d) -> bool:
    """Tell whether Winograd's algorithm applies: kernels of 1, 3 or 5 rows and columns, without
    stride, one group. Images have at most as much padding as taps reach, and volumes any depth."""
    images, _ = parts_of(conv)
    return (
        max(images.kernel) > 1
        and set(images.kernel) <= {1, 3, 5}
        and (images.strides, images.groups) == ((1, 1), 1)
        and all(
            0 <= size <= most for size, most in zip(images.padding, _reach(images), strict=True)
        )
    )


def _reach(images: Conv2d) -> tuple[int, ...]:
    """Return the distances of the first and last taps, in the order of the padding."""
    height, width = ((axis.kernel - 1) * axis.dilation for axis in (images.height, images.width))
    return height, width, height, width


def parts_of(conv: Conv2d | Conv3d) -> tuple[Conv2d, Windows]:
    """Return the convolution of images, and the axis along which their results are added."""
    return (conv.slices, conv.depth) if isinstance(conv, Conv3d) else (conv, ONE)


@dataclass(frozen=True)
class WinogradPlan(Plan):
    """The plan of a convolution, or of a data gradient as a convolution of the output gradient.

    Attributes
    ----------
    conv : Conv2d
        The convolution of images.
    slices : Slices
        The images of a volume.
    squares : Squares
        The squares of results, and their transforms.
    lanes, cores : int
        The elements of a vector, and the threads that share the work.
    tile_rows, tile_vectors : int
        The squares and the vectors of channels of a tile of a product.
    depth, round : int
        The channels that a tile sums over at once, and the channels of a round of its loop.
    is_fused : bool
        Whether a task performs all steps for its squares; otherwise, each step is performed for a
        chunk of images.
    images, block, rows : int
        The images of a chunk, the slices of a block, and the rows of squares of a task; of a chunk,
        all rows.
    """

    conv: Conv2d
    slices: Slices
    squares: Squares
    lanes: int
    cores: int
    tile_rows: int
    tile_vectors: int
    depth: int
    round: int
    is_fused: bool
    images: int
    block: int
    rows: int

    @property
    def batch(self) -> Extent:
        """The number of images, each interleaved by a dilation counted apart."""
        return self.conv.batch * self.squares.height.phases

    @property
    def ins(self) -> int:
        """The channels of the data, in whole vectors."""
        return ceil_div(self.conv.in_channels, self.lanes) * self.lanes

    @property
    def panel(self) -> int:
        """The channels of a panel of the weight."""
        return self.tile_vectors * self.lanes

    @property
    def panels(self) -> int:
        """The panels of the weight."""
        return ceil_div(self.conv.out_channels, self.panel)

    @property
    def outs(self) -> int:
        """The channels of the result, in whole panels."""
        return self.panels * self.panel

    @property
    def blocks(self) -> int:
        """The blocks of slices."""
        return ceil_div(self.slices.axis.target, self.block)

    @cached_property
    def _in_tiles(self) -> int:
        """The squares of a task or a chunk, in whole tiles."""
        number = self.images * self.rows * self.squares.wide
        return ceil_div(number, self.tile_rows) * self.tile_rows

    # The strides of slices and of the elements of a square, in data, results and weight.

    @property
    def in_slice(self) -> int:
        return self._in_tiles * self.ins

    @property
    def out_slice(self) -> int:
        return self._in_tiles * self.outs

    @property
    def weight_slice(self) -> int:
        return self.conv.in_channels * self.panel

    @cached_property
    def in_plane(self) -> int:
        return apart(self.slices.read(self.block) * self.in_slice)

    @cached_property
    def out_plane(self) -> int:
        return apart(self.block * self.out_slice)

    @cached_property
    def weight_plane(self) -> int:
        return apart(self.panels * self.slices.taps * self.weight_slice)

    def lines(self) -> dict[str, str]:
        """Return the decisions and their values as text."""
        squares, batch = self.squares, extent_as_text(self.batch)
        if self.is_fused:
            parts = ceil_div(squares.tall, self.rows)
            steps = "all of some squares by one task"
            tasks = f"{batch} x {self.blocks} x {parts} of {self.rows} rows of squares"
        else:
            steps = f"each for {self.images} images"
            tasks = f"{extent_as_text(ceil_div(self.batch, self.images))} x {self.blocks} chunks"
        return {
            "squares": squares.as_text(),
            "tile": f"{self.tile_rows} squares x {self.tile_vectors} vectors, rounds of "
            f"{self.round} steps",
            "depth": f"{self.depth} of {self.conv.in_channels} channels at once",
            "steps": steps,
            "slices": f"{self.block} of {self.slices.axis.target} at once",
            "tasks": tasks,
        }


def winograd_plan(conv: Conv2d | Conv3d, cpu: CPU, square: int) -> WinogradPlan:
    """Return the plan of a convolution with squares of ``square`` results."""
    images, depth = parts_of(conv)
    return _plan(images, Slices(Axis.forward(depth), depth.kernel), cpu, square)


def winograd_data_plan(conv: Conv2d | Conv3d, cpu: CPU, square: int) -> WinogradPlan:
    """Return the plan of a data gradient: of the convolution of the output gradient with the
    flipped weight, whose input and output channels are swapped."""
    images, depth = parts_of(conv)
    top, left, bottom, right = (
        most - size for most, size in zip(_reach(images), images.padding, strict=True)
    )
    turned = replace(
        images,
        in_channels=images.out_channels,
        out_channels=images.in_channels,
        size=images.out_size,
        padding=(top, left, bottom, right),
    )
    slices = Slices(Axis.backward(depth), depth.kernel, is_flipped=True)
    return _plan(turned, slices, cpu, square)


def _plan(conv: Conv2d, slices: Slices, cpu: CPU, square: int) -> WinogradPlan:
    squares, limits = Squares.of(conv, square), cpu.tuning.convolutions
    height, vectors = cpu.tuning.tiles.largest
    vectors = min(vectors, ceil_div(conv.out_channels, cpu.lanes))
    panel = vectors * cpu.lanes
    outs = ceil_div(conv.out_channels, panel) * panel
    ins = ceil_div(conv.in_channels, cpu.lanes) * cpu.lanes
    weight = 4 * squares.cells * slices.taps * conv.in_channels * outs
    is_fused = weight <= limits.winograd_fused
    partition = _Partition(conv, slices, squares, limits=limits, ins=ins, outs=outs)
    images, block, rows = partition.of_tasks(cpu.cores) if is_fused else partition.of_chunks()
    return WinogradPlan(
        *(conv, slices, squares, cpu.lanes, cpu.cores),
        tile_rows=balanced(images * rows * squares.wide, height),
        tile_vectors=vectors,
        depth=ceil_div(conv.in_channels, ceil_div(conv.in_channels, _DEPTH)),
        round=limits.winograd_round,
        is_fused=is_fused,
        images=images,
        block=block,
        rows=rows,
    )


@dataclass(frozen=True)
class _Partition:
    """The division of a convolution among tasks, or into chunks."""

    conv: Conv2d
    slices: Slices
    squares: Squares
    limits: Convolutions
    ins: int
    outs: int

    @property
    def batch(self) -> Extent:
        return self.conv.batch * self.squares.height.phases

    def of_tasks(self, cores: int) -> tuple[int, int, int]:
        """Return the images, slices and rows of squares of a task."""
        if self.slices.is_flat:
            return 1, 1, self._rows(1, cores)

        def cost(partition: tuple[int, int]) -> float:
            """Return the copies and transforms of a slice of the source, for a slice of the
            target."""
            (block, rows), height = partition, self.squares.height
            halo = (height.windows.kernel - 1) / (rows * height.size)
            excess = max(1.0, self._row(block) * rows / self.limits.winograd_task)
            return self.slices.read(block) / block * (1 + 0.5 * halo) * excess

        sizes = ((size, self._rows(size, cores)) for size in self.slices.sizes())
        return 1, *min(sizes, key=cost)

    def of_chunks(self) -> tuple[int, int, int]:
        """Return the images, slices and rows of squares of a chunk."""
        sizes, most, tall = self.slices.sizes(), self.limits.winograd_chunk, self.squares.tall
        block = next((size for size in sizes if self._row(size) * tall <= most), sizes[-1])
        images = max(1, most // (self._row(block) * tall))
        if isinstance(self.batch, int):
            return ceil_div(self.batch, ceil_div(self.batch, images)), block, tall
        return min(images, _MOST_IMAGES), block, tall

    def _row(self, block: int) -> int:
        """Return the bytes of a row of squares of a block of slices."""
        channels = self.ins * self.slices.read(block) + self.outs * block
        return 4 * self.squares.cells * channels * self.squares.wide

    def _rows(self, block: int, cores: int) -> int:
        """Return the number of rows of squares of a task."""
        tall = self.squares.tall
        rows = max(1, min(tall, self.limits.winograd_task // self._row(block)))
        if isinstance(self.batch, int):
            blocks = self.batch * ceil_div(self.slices.axis.target, block)
            rows = min(rows, ceil_div(tall, ceil_div(2 * cores, blocks)))
        return ceil_div(tall, ceil_div(tall, rows))
