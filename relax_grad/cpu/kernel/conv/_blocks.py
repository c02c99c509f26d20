"""Partition of a convolution: tiles for registers, panels and blocks for caches, tasks for
threads."""

from __future__ import annotations

from tvm import tirx

from ...target import CPU
from ..language.builder import Extent, Vectors, bind, ceil_div, const
from .gathering import Gathering

#: Expected number of images of a symbolic batch. Other numbers only make the partition less even.
_EXPECTED_IMAGES = 8


class Blocking:
    """The block sizes of a convolution kernel.

    Attributes
    ----------
    vectors : Vectors
        The vectors of the target.
    pixels, tile_vectors : int
        The maximum number of pixels of a tile, and the number of vectors across a panel.
    width, panels : int
        The number of channels of a panel, and the number of panels.
    panel_slice : int
        The elements of a slice of a panel.
    plane : int
        The elements of an image of the source in memory.
    depth, depths : int
        The number of source channels that a tile sums over at once, and the number of such
        stretches.
    is_at_once : bool
        Whether one tile computes each sum completely, from its first term to its last.
    is_streamed : bool
        Whether the weight is evicted from the cache between two images.
    is_packed : bool
        Whether the source is copied: to pad it, to skip elements that are not read, or because the
        distance of its planes maps them to few sets of a cache.
    source_depths, source_depth, source_parts : int
        The number of stretches of source channels that a task copies at once, the number of their
        channels, and the number of such copies.
    channels_ahead : int
        The source channels that an image in place is prefetched before it is read, or 0.
    pitch : int
        The columns of a copied row.
    block_rows, block_images, row_blocks, image_blocks : int or tirx.PrimExpr
        The number of rows (of a phase) and of images in a block, and the number of blocks along
        each.
    tile_images : int
        The number of images that share a tile, with the same row of each.
    task_panels : int
        The number of panels of a block that a task computes.
    """

    def __init__(self, gathering: Gathering, cpu: CPU):
        self.g, self.cpu = gathering, cpu
        self.rows, self.columns = gathering.rows, gathering.columns
        self.vectors = Vectors(cpu.lanes)
        limits = self.limits = cpu.tuning.convolutions
        self.pixels, self.tile_vectors = limits.tile
        if gathering.targets <= cpu.lanes:
            # A tile needs at least as many independent sums as multiply-adds are in flight.
            self.pixels, self.tile_vectors = max(self.pixels, 12), 1
        self.width = self.tile_vectors * cpu.lanes
        self.panels = ceil_div(gathering.targets, self.width)
        self.panel_slice = gathering.sources * gathering.taps * self.width
        self.plane = self.rows.stored * self.columns.stored
        self.depth = self._depth()
        self.depths = ceil_div(gathering.sources, self.depth)
        phases = (phase for axis in gathering.axes for phase in axis.phases)
        is_covered = all(phase.number > 0 for phase in phases)
        self.is_at_once = self.depths == 1 and gathering.is_flat and is_covered
        weights = gathering.groups * self.panels * gathering.kernel[0] * self.panel_slice
        self.is_streamed = 4 * weights > limits.weights
        is_dense = all(axis.is_inside and axis.apart == 1 for axis in gathering.axes)
        self.is_packed = not is_dense or self.plane * gathering.slices.stored % 256 == 0
        is_small = not self.is_packed and self.plane <= limits.small_plane
        self.channels_ahead = cpu.tuning.prefetch.steps if is_small else 0
        self.pitch = self.columns.extent(self.columns.count())
        self.block_rows, self.block_images, self.source_depths = self._blocks()
        self.source_parts = ceil_div(self.depths, self.source_depths)
        self.source_depth = min(self.g.sources, self.source_depths * self.depth)
        self.row_blocks = ceil_div(self.rows.count(), self.block_rows)
        self.image_blocks = ceil_div(gathering.images, self.block_images)
        self.tile_images = self._tile_images(self.block_images)
        self.task_panels = self._task_panels()

    def _depth(self) -> int:
        """Return the number of source channels that a tile sums over at once."""
        fitting = max(1, self.limits.panel // (4 * self.width * self.g.taps))
        return ceil_div(self.g.sources, ceil_div(self.g.sources, fitting))

    def _blocks(self) -> tuple[int, int, int]:
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
        if self._tile_images(images) <= self._tile_images(whole[1]):
            return *whole, self.depths
        stretch = 4 * self.depth * self._source_elements(rows) * images
        return (
            rows,
            images,
            ceil_div(self.depths, ceil_div(self.depths, self.limits.source // stretch)),
        )

    def _source_elements(self, rows: int) -> int:
        """Return the elements of a source channel that some rows read."""
        return self.g.kernel[0] * self.rows.extent(rows) * self.pitch

    def _blocks_with(self, stretches: int) -> tuple[int, int]:
        """Return the number of rows (of a phase) and of images in a task that copies some stretches
        of source channels at once."""
        phases, count = len(self.rows.phases), self.rows.count()
        pixels = phases * self.columns.target
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

    def _tile_images(self, images: int) -> int:
        """Return the number of images of a task that share a tile: more than one if rows are
        short."""
        most = min(self.pixels // self.columns.count(), images)
        return 1 << (max(1, most).bit_length() - 1)

    def _task_panels(self) -> int:
        """Return the number of panels of a task."""
        blocks = ceil_div(self._expected_images(), self.block_images) * self.row_blocks
        wanted = ceil_div(4 * self.cpu.cores, blocks)
        return ceil_div(self.panels, min(self.panels, wanted))

    def _expected_images(self) -> int:
        """Return the number of images, or the expected number if it is symbolic."""
        if isinstance(self.g.images, int):
            return self.g.images
        return _EXPECTED_IMAGES * self.g.groups * self.g.slices.target

    def at_most(self, size: int, extent: Extent, start: tirx.PrimExpr) -> tirx.PrimExpr:
        """Return the number of elements of the block at ``start``, which the extent may cut off."""
        if size == 1 or (isinstance(extent, int) and extent % size == 0):
            return const(size)
        return bind(tirx.min(const(size), extent - start))

    def stretch(self, k: tirx.PrimExpr) -> tuple[tirx.PrimExpr, tirx.PrimExpr]:
        """Return the first source channel of a stretch, and its number of source channels."""
        first = bind(k * self.depth)
        return first, self.at_most(self.depth, self.g.sources, first)
