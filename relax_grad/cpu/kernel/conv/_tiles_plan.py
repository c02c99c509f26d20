"""Plans of convolutions and their gradients by tiles of bfloat16 (AMX)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ...target import CPU
from ..language import amx
from ..language.builder import ceil_div
from ..language.plans import Plan, extent_as_text
from ._amx_lines import Lines
from ._chunks import grid
from ._weight_plan import joined
from .gathering import Axis, Gathering
from .geometry import Conv2d

#: The elements of k in a step of tiles: channels of the source, or pixels of dY.
STEP = 2 * amx.STEPS

#: The fewest channels of a group for which empty pairs and tiles take less time than multiply-adds
#: of float32.
FEWEST_CHANNELS = 16

#: The channels of a block of dY, and of a block of X.
OUTS, INS = amx.ROWS, amx.COLUMNS

#: The elements of a cache line, of pairs.
_LINE = 16

#: Expected number of images of a symbolic batch.
_EXPECTED_IMAGES = 8


def takes_conv(gathering: Gathering) -> bool:
    """Tell whether tiles compute a convolution faster than vectors."""
    return gathering.sources >= FEWEST_CHANNELS


def takes_weight_gradient(conv: Conv2d) -> bool:
    """Tell whether tiles compute a weight gradient faster than vectors."""
    return min(conv.in_channels, conv.out_channels) // conv.groups >= FEWEST_CHANNELS


@dataclass(frozen=True)
class TilesPlan(Plan):
    """The plan of a convolution, or of its data gradient, by tiles.

    Attributes
    ----------
    gathering : Gathering
        The computation.
    lanes, cores : int
        The elements of a vector, and the threads that share the work.
    height : int
        The target channels of a block: the rows of a tile.
    task_rows : int
        The most rows of the target, of a phase, that a task computes.
    parts : int
        The parts of the target channels, each with separate tasks.
    """

    gathering: Gathering
    lanes: int
    cores: int
    height: int
    task_rows: int
    parts: int

    @cached_property
    def rows(self) -> Lines:
        """The rows of the planes of the source."""
        return Lines(self.gathering.rows)

    @cached_property
    def columns(self) -> Lines:
        """The columns of the planes of the source."""
        return Lines(self.gathering.columns)

    @property
    def steps(self) -> int:
        """The steps of a sum over source channels."""
        return ceil_div(self.gathering.sources, STEP)

    @property
    def blocks(self) -> int:
        """The blocks of target channels."""
        return ceil_div(self.gathering.targets, self.height)

    @property
    def pitch(self) -> int:
        """The elements of a row of weights: rows that are apart by a power of 2 would share sets of
        the cache."""
        return (self.steps | 1) * STEP

    @property
    def count(self) -> int:
        """The columns of a phase of the target."""
        return self.gathering.columns.count()

    @property
    def distance(self) -> int:
        """The columns of a plane."""
        return self.count + self.columns.span - 1

    @property
    def planes(self) -> int:
        """The planes of a pair of source channels."""
        return len(self.rows.remainders) * len(self.columns.remainders)

    @property
    def slices(self) -> int:
        """The most slices of a volume that an image of the target reads."""
        return max(taps.number for taps in self.gathering.slices.phases)

    @property
    def row_blocks(self) -> int:
        """The blocks of rows of an image."""
        return ceil_div(self.gathering.rows.count(), self.task_rows)

    @cached_property
    def plane(self) -> int:
        """The elements of a plane: an odd number of cache lines, so that the rows of a tile are in
        different sets of the cache."""
        lines = ceil_div((self.task_rows + self.rows.span - 1) * self.distance, _LINE)
        return (lines | 1) * _LINE

    @property
    def slice(self) -> int:
        """The elements of the planes of a slice."""
        return self.planes * self.steps * amx.STEPS * self.plane

    @property
    def taps(self) -> int:
        """The taps of the weight, along all axes."""
        return self.gathering.kernel[0] * self.gathering.taps

    @property
    def weights(self) -> int:
        """The elements of the weight of a block of target channels."""
        return self.taps * self.height * self.pitch

    @property
    def kept(self) -> int:
        """The phases of columns whose sums are stored together."""
        phases = len(self.gathering.columns.phases)
        return phases if phases == 2 else 1

    def lines(self) -> dict[str, str]:
        """Return the decisions and their values as text."""
        images = extent_as_text(self.gathering.images)
        return {
            "tile": f"{self.height} target channels x {amx.COLUMNS} pixels",
            "depth": f"{self.steps} steps of {STEP} source channels",
            "block": f"{self.task_rows} rows, copied as {self.planes} planes of pairs of channels",
            "tasks": f"{images} x {self.row_blocks} blocks, {self.parts} parts of {self.blocks} "
            "blocks of channels",
        }


def tiles_plan(gathering: Gathering, cpu: CPU) -> TilesPlan:
    """Return the plan of a computation for which :func:`takes_conv` holds."""
    height = amx.ROWS if gathering.targets > amx.ROWS // 2 else amx.ROWS // 2
    count = gathering.rows.count()
    own = TilesPlan(gathering, cpu.lanes, cpu.cores, height=height, task_rows=count, parts=1)
    line = 4 * amx.STEPS * own.steps * own.slices * own.planes * own.distance
    rows = max(1, cpu.tuning.convolutions.source // line - own.rows.span + 1)
    task_rows = ceil_div(count, ceil_div(count, rows))
    images = gathering.images if isinstance(gathering.images, int) else _EXPECTED_IMAGES
    wanted = ceil_div(4 * cpu.cores, max(1, images * ceil_div(count, task_rows)))
    return TilesPlan(
        gathering,
        cpu.lanes,
        cpu.cores,
        height=height,
        task_rows=task_rows,
        parts=min(own.blocks, wanted),
    )


@dataclass(frozen=True)
class WeightTilesPlan(Plan):
    """The plan of a weight gradient by tiles.

    Attributes
    ----------
    conv : Conv2d
        The convolution, whose rows may be joined.
    lanes : int
        The elements of a vector.
    images : int
        The images of a chunk.
    task_rows : int
        The rows of dY of a chunk.
    parts : tuple[int, int]
        The ranges of blocks of input and of output channels, for the threads.
    """

    conv: Conv2d
    lanes: int
    images: int
    task_rows: int
    parts: tuple[int, int]

    @cached_property
    def rows(self) -> Lines:
        """The rows of the copies of X."""
        return Lines(Axis.forward(self.conv.height))

    @cached_property
    def columns(self) -> Lines:
        """The columns of the copies of X."""
        return Lines(Axis.forward(self.conv.width))

    @property
    def ins(self) -> int:
        """The input channels of a group."""
        return self.conv.in_channels // self.conv.groups

    @property
    def outs(self) -> int:
        """The output channels of a group."""
        return self.conv.out_channels // self.conv.groups

    @property
    def in_blocks(self) -> int:
        """The blocks of input channels of a group."""
        return ceil_div(self.ins, INS)

    @property
    def out_blocks(self) -> int:
        """The blocks of output channels of a group."""
        return ceil_div(self.outs, OUTS)

    @property
    def taps(self) -> int:
        """The taps of the kernel."""
        return self.conv.kernel[0] * self.conv.kernel[1]

    @property
    def pitch(self) -> int:
        """The columns of a copied row of dY, in whole pairs."""
        return _pitch(self.conv)

    @property
    def depth(self) -> int:
        """The elements of a copied image of dY, in whole steps."""
        return ceil_div(self.task_rows * self.pitch, STEP) * STEP

    @property
    def row(self) -> int:
        """The elements of a channel of dY: an odd number of cache lines, so that the rows of a tile
        are in different sets of the cache."""
        return (ceil_div(self.images * self.depth, STEP) | 1) * STEP

    @property
    def reads(self) -> int:
        """The rows of X of a chunk, of a remainder."""
        return self.task_rows + self.rows.span - 1

    @property
    def line(self) -> int:
        """The elements of a copied row of X."""
        return ceil_div(self.pitch, STEP) * STEP + self.columns.span + 1

    @property
    def plane(self) -> int:
        """The pairs of a remainder of the rows of X, of a channel."""
        return self.reads * (self.pitch // 2)

    @property
    def image(self) -> int:
        """The pairs of an image of a block of channels of X."""
        return len(self.rows.remainders) * self.plane * INS

    @property
    def has_tails(self) -> bool:
        """Whether the pixels of a chunk may be other than whole tiles."""
        height = self.conv.height.number
        chunks = {self.task_rows, height % self.task_rows or self.task_rows}
        return any(lines * self.pitch % STEP for lines in chunks)

    def lines(self) -> dict[str, str]:
        """Return the decisions and their values as text."""
        by_in, by_out = self.parts
        height = self.conv.height.number
        return {
            "tile": f"{OUTS} output x {INS} input channels of a tap",
            "chunk": f"{self.task_rows} of {height} rows of {self.images} images",
            "threads share": f"{self.conv.groups} groups, {self.in_blocks} blocks of input "
            f"channels in {by_in} parts, {self.out_blocks} of output channels in {by_out}",
        }


def weight_tiles_plan(conv: Conv2d, cpu: CPU) -> WeightTilesPlan:
    """Return the plan of a weight gradient for which :func:`takes_weight_gradient` holds."""
    most = cpu.tuning.convolutions.unit_pixels
    conv = joined(conv).with_rows_of(most)
    (height, _), pitch = conv.out_size, _pitch(conv)
    rows = ceil_div(height, ceil_div(height, max(1, min(height, most // pitch))))
    images = max(1, most // (rows * pitch)) if rows == height else 1
    if isinstance(conv.batch, int):
        images = min(images, max(conv.batch, 1))
    own = WeightTilesPlan(conv, cpu.lanes, images, rows, (1, 1))
    # Copying a block of X costs as much as a few blocks of dY.
    cores = ceil_div(cpu.cores, conv.groups)
    parts = grid((own.in_blocks, own.out_blocks), cores, copy=2)
    return WeightTilesPlan(conv, cpu.lanes, images, rows, parts)


def _pitch(conv: Conv2d) -> int:
    # Pairs of columns of dY are on one row.
    return ceil_div(conv.width.number, 2) * 2
