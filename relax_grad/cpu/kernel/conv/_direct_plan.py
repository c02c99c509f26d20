"""Plans of direct convolutions: tiles for registers, panels and blocks for caches, tasks for
threads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from ...kernel_limits import Convolutions
from ...target import CPU
from ..language.builder import Extent, ceil_div
from ..language.plans import Plan, ahead_as_text, extent_as_text
from .gathering import Gathering, Taps

#: Expected number of images of a symbolic batch. Other numbers only make the partition less even.
_EXPECTED_IMAGES = 8

#: Taps that read padding are skipped if a row has at most this many tiles, and less than this
#: fraction of its reads is in bounds.
_MOST_TILES = 3
_MOST_READ = 0.96


@dataclass(frozen=True)
class DirectPlan(Plan):
    """The plan of a convolution, or of its data gradient, with channels of the target as lanes.

    Attributes
    ----------
    gathering : Gathering
        The computation; of pairs of source channels, if bfloat16 is multiplied in pairs.
    lanes, cores : int
        The elements of a vector, and the threads that share the work.
    pixels, tile_vectors : int
        The maximum number of pixels of a tile, and the number of vectors across a panel.
    depth : int
        The number of source channels that a tile sums over at once: a stretch.
    is_streamed : bool
        Whether the weight is evicted from the cache between two images.
    is_packed : bool
        Whether the source is copied: to pad it, to skip elements that are not read, or because the
        distance of its planes maps them to few sets of a cache.
    channels_ahead : int
        The source channels that an image in place is prefetched before it is read, or 0.
    block_rows, block_images : int
        The number of rows (of a phase) and of images in a block.
    source_depths : int
        The number of stretches of source channels that a task copies at once.
    tile_images : int
        The number of images that share a tile, with the same row of each.
    task_panels : int
        The number of panels of a block that a task computes.
    """

    gathering: Gathering
    lanes: int
    cores: int
    pixels: int
    tile_vectors: int
    depth: int
    is_streamed: bool
    is_packed: bool
    channels_ahead: int
    block_rows: int
    block_images: int
    source_depths: int
    tile_images: int
    task_panels: int

    @property
    def width(self) -> int:
        """The number of channels of a panel."""
        return self.tile_vectors * self.lanes

    @property
    def panels(self) -> int:
        """The number of panels."""
        return ceil_div(self.gathering.targets, self.width)

    @property
    def panel_slice(self) -> int:
        """The elements of a slice of a panel."""
        return self.gathering.sources * self.gathering.taps * self.width

    @property
    def depths(self) -> int:
        """The number of stretches of source channels."""
        return ceil_div(self.gathering.sources, self.depth)

    @cached_property
    def is_at_once(self) -> bool:
        """Whether one tile computes each sum completely, from its first term to its last."""
        phases = (phase for axis in self.gathering.axes for phase in axis.phases)
        is_covered = all(phase.number > 0 for phase in phases)
        return self.depths == 1 and self.gathering.is_flat and is_covered

    @property
    def pitch(self) -> int:
        """The columns of a copied row."""
        columns = self.gathering.columns
        return columns.extent(columns.count())

    @property
    def source_depth(self) -> int:
        """The number of source channels that a task copies at once."""
        return min(self.gathering.sources, self.source_depths * self.depth)

    @property
    def source_parts(self) -> int:
        """The number of copies of source channels, one after the other."""
        return ceil_div(self.depths, self.source_depths)

    @property
    def row_blocks(self) -> int:
        """The number of blocks of rows."""
        return ceil_div(self.gathering.rows.count(), self.block_rows)

    @property
    def image_blocks(self) -> Extent:
        """The number of blocks of images."""
        return ceil_div(self.gathering.images, self.block_images)

    @property
    def parts(self) -> int:
        """The number of tasks of a block of images and rows."""
        return ceil_div(self.panels, self.task_panels)

    def row_pixels(self, phase: int) -> int:
        """Return the most pixels of the tiles of a row of a phase of the columns."""
        count = self.gathering.columns.count(phase)
        return ceil_div(count, ceil_div(count, self.pixels))

    def inside(self, phase: int, first: int, size: int) -> list[list[int]]:
        """Return, for each tap of a phase, the columns of a tile whose reads are in bounds."""
        columns = self.gathering.columns
        across = columns.phases[phase]
        starts = [(first + i) * columns.step + across.offset for i in range(size)]
        return [
            [i for i, at in enumerate(starts) if 0 <= at + q * across.move < columns.source]
            for q in range(across.number)
        ]

    def skips_padding(self, phase: int) -> bool:
        """Tell whether skipping taps that read padding is worth separate code for each tile of a
        row."""
        count, taps = self.gathering.columns.count(phase), self._taps(phase)
        read = sum(map(len, self.inside(phase, 0, count)))
        is_short = count <= _MOST_TILES * self.row_pixels(phase)
        return is_short and read < _MOST_READ * count * taps.number

    def _taps(self, phase: int) -> Taps:
        return self.gathering.columns.phases[phase]

    def lines(self) -> dict[str, str]:
        """Return the decisions and their values as text."""
        g = self.gathering
        skips = [
            self.skips_padding(phase)
            for phase in range(len(g.columns.phases))
            if g.columns.count(phase) and self._taps(phase).number
        ]
        copied = "read in place" if not self.is_packed else "copied"
        if self.source_parts > 1:
            copied += f", {self.source_depth} channels at once"
        shared = f", {self.tile_images} images share a tile" if self.tile_images > 1 else ""
        return {
            "tile": f"{self.pixels} pixels x {self.tile_vectors} vectors{shared}",
            "padding": "skipped by separate tiles" if any(skips) else "read",
            "depth": f"{self.depth} source channels at once, of {g.sources}",
            "panels": f"{self.panels} of {self.width} channels, "
            f"{'prefetched from memory' if self.is_streamed else 'in a cache'}",
            "source": f"{copied}, prefetch: {ahead_as_text(self.channels_ahead)}",
            "block": f"{self.block_rows} rows of {self.block_images} images",
            "tasks": f"{extent_as_text(self.image_blocks)} x {self.row_blocks} blocks, "
            f"{self.parts} parts of {self.task_panels} panels",
        }


def direct_plan(gathering: Gathering, cpu: CPU) -> DirectPlan:
    """Return the plan of a convolution or a data gradient whose lanes are channels."""
    sizes = _Sizes(gathering, cpu)
    rows, images, depths = sizes.blocks()
    is_small = not sizes.is_packed and gathering.plane <= sizes.limits.small_plane
    return DirectPlan(
        *(gathering, cpu.lanes, cpu.cores, *sizes.tile, sizes.depth),
        is_streamed=sizes.is_streamed,
        is_packed=sizes.is_packed,
        channels_ahead=cpu.tuning.prefetch.steps if is_small else 0,
        block_rows=rows,
        block_images=images,
        source_depths=depths,
        tile_images=sizes.tile_images(images),
        task_panels=sizes.task_panels(rows, images),
    )


def plan_of_pairs(gathering: Gathering, cpu: CPU) -> DirectPlan:
    """Return the plan of a computation in bfloat16 whose source channels are pairs."""
    pairs = replace(gathering, sources=ceil_div(gathering.sources, 2))
    return replace(direct_plan(pairs, cpu), is_packed=True)


@dataclass(frozen=True)
class _Sizes:
    """The sizes that the decisions of :func:`direct_plan` depend on."""

    g: Gathering
    cpu: CPU

    @property
    def limits(self) -> Convolutions:
        return self.cpu.tuning.convolutions

    @cached_property
    def tile(self) -> tuple[int, int]:
        """The pixels and the vectors of a tile."""
        pixels, vectors = self.limits.tile
        # A tile needs at least as many independent sums as multiply-adds are in flight.
        return (max(pixels, 12), 1) if self.g.targets <= self.cpu.lanes else (pixels, vectors)

    @property
    def width(self) -> int:
        return self.tile[1] * self.cpu.lanes

    @property
    def panels(self) -> int:
        return ceil_div(self.g.targets, self.width)

    @cached_property
    def depth(self) -> int:
        """The number of source channels that a tile sums over at once."""
        fitting = max(1, self.limits.panel // (4 * self.width * self.g.taps))
        return ceil_div(self.g.sources, ceil_div(self.g.sources, fitting))

    @property
    def depths(self) -> int:
        return ceil_div(self.g.sources, self.depth)

    @property
    def is_streamed(self) -> bool:
        panel = self.g.kernel[0] * self.g.sources * self.g.taps * self.width
        return 4 * self.g.groups * self.panels * panel > self.limits.weights

    @property
    def is_packed(self) -> bool:
        is_dense = all(axis.is_inside and axis.apart == 1 for axis in self.g.axes)
        return not is_dense or self.g.plane * self.g.slices.stored % 256 == 0

    def blocks(self) -> tuple[int, int, int]:
        """Return the number of rows (of a phase) and of images in a task, and the number of
        stretches of source channels that it copies at once.

        Short rows of several images share tiles. If only parts of the channels of so many images
        fit in a cache, a task copies these parts one after the other, and reads the weight once for
        all images.
        """
        whole = self._blocks_with(self.depths)
        is_single = self.g.is_flat and self.g.groups == 1
        if not (is_single and self.is_packed and self.is_streamed):
            return *whole, self.depths
        rows, images = self._blocks_with(1)
        if self.tile_images(images) <= self.tile_images(whole[1]):
            return *whole, self.depths
        stretch = 4 * self.depth * self._source_elements(rows) * images
        fitting = self.limits.source // stretch
        return rows, images, ceil_div(self.depths, ceil_div(self.depths, fitting))

    def _source_elements(self, rows: int) -> int:
        """Return the elements of a source channel that some rows read."""
        columns = self.g.columns
        return self.g.kernel[0] * self.g.rows.extent(rows) * columns.extent(columns.count())

    def _blocks_with(self, stretches: int) -> tuple[int, int]:
        """Return the number of rows (of a phase) and of images in a task that copies some stretches
        of source channels at once."""
        phases, count = len(self.g.rows.phases), self.g.rows.count()
        pixels = phases * self.g.columns.target
        channels = min(self.g.sources, stretches * self.depth)

        def fits(rows: int, images: int) -> bool:
            source = self._source_elements(rows) * channels * 4
            target = rows * pixels * self.width * 4
            limits = self.limits
            return source * images <= limits.source and target * images <= limits.target

        rows = next((n for n in range(count, 1, -1) if fits(n, 1)), 1)
        rows = ceil_div(count, ceil_div(count, rows))
        images = 1
        if rows == count and self.g.groups == 1 and self.g.is_flat:
            most = self._expected_images() // self.cpu.cores
            while images * 2 <= most and fits(rows, images * 2):
                images *= 2
        return rows, images

    def tile_images(self, images: int) -> int:
        """Return the number of images of a task that share a tile: more than one if rows are
        short."""
        most = min(self.tile[0] // self.g.columns.count(), images)
        return 1 << (max(1, most).bit_length() - 1)

    def task_panels(self, rows: int, images: int) -> int:
        """Return the number of panels of a task."""
        blocks = ceil_div(self._expected_images(), images) * ceil_div(self.g.rows.count(), rows)
        wanted = ceil_div(4 * self.cpu.cores, blocks)
        return ceil_div(self.panels, min(self.panels, wanted))

    def _expected_images(self) -> int:
        """Return the number of images, or the expected number if it is symbolic."""
        if isinstance(self.g.images, int):
            return self.g.images
        return _EXPECTED_IMAGES * self.g.groups * self.g.slices.target
