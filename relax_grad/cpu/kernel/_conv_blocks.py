"""How the work of a convolution is divided: tiles for registers, panels and blocks for caches, tasks for threads."""

from __future__ import annotations

from tvm import tirx

from ..target import CPU
from .builder import Extent, Vectors, bind, ceil_div, const
from .gathering import Gathering

#: Bytes of the source that a task copies, less than half of a second-level cache.
_SOURCE_BYTES = 400 * 1024

#: Bytes of the target that a task sums up channels last.
_TARGET_BYTES = 96 * 1024

#: Bytes of a panel that tiles go through before the next source channels.
_PANEL_BYTES = 32 * 1024

#: Images that a symbolic batch is expected to have. With others the work is divided less evenly, no more.
_EXPECTED_IMAGES = 8

#: Bytes of weights that stay in a second-level cache from one image to the next.
_WEIGHT_BYTES = 512 * 1024


def tile(cpu: CPU) -> tuple[int, int]:
    """Return pixels and vectors of the largest tile that fits the registers."""
    return (14, 2) if cpu.registers >= 32 else (6, 2)


class Blocking:
    """The sizes of a kernel for a convolution.

    Attributes
    ----------
    vectors : Vectors
        The vectors of the target.
    pixels, tile_vectors : int
        The most pixels of a tile, and the vectors of a panel.
    width, panels : int
        The channels of a panel, and how many panels there are.
    panel_slice : int
        The elements of a slice of a panel.
    plane : int
        The elements of an image of the source in memory.
    depth, depths : int
        How many source channels a tile sums over at once, and how often that is.
    is_at_once : bool
        Whether each sum is that of one tile, from its first term to its last.
    is_streamed : bool
        Whether the weight leaves the cache between two images.
    is_packed : bool
        Whether the source is copied: for its padding, to leave out what is not read, or because its planes lie so far
        apart that they share few sets of a cache.
    pitch : int
        The columns of a copied row.
    block_rows, block_images, row_blocks, image_blocks : int or tirx.PrimExpr
        How many rows (of a phase) and images a block has, and how many blocks there are of them.
    tile_images : int
        How many images share a tile, of the same row of each.
    task_panels : int
        How many panels a task computes of a block.
    """

    def __init__(self, gathering: Gathering, cpu: CPU):
        self.g, self.cpu = gathering, cpu
        self.rows, self.columns = gathering.rows, gathering.columns
        self.vectors = Vectors(cpu.lanes)
        self.pixels, self.tile_vectors = tile(cpu)
        if gathering.targets <= cpu.lanes:
            # Sums that do not wait for each other: at least as many as what is in flight at once.
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
        self.is_streamed = 4 * weights > _WEIGHT_BYTES
        is_dense = all(axis.is_inside and axis.apart == 1 for axis in gathering.axes)
        self.is_packed = not is_dense or self.plane * gathering.slices.stored % 256 == 0
        self.pitch = self.columns.extent(self.columns.count())
        self.block_rows, self.block_images = self._blocks()
        self.row_blocks = ceil_div(self.rows.count(), self.block_rows)
        self.image_blocks = ceil_div(gathering.images, self.block_images)
        self.tile_images = self._tile_images()
        self.task_panels = self._task_panels()

    def _depth(self) -> int:
        """Return how many source channels a tile sums over at once."""
        fitting = max(1, _PANEL_BYTES // (4 * self.width * self.g.taps))
        return ceil_div(self.g.sources, ceil_div(self.g.sources, fitting))

    def _blocks(self) -> tuple[int, int]:
        """Return how many rows (of a phase) and images a task has."""
        phases, count = len(self.rows.phases), self.rows.count()
        pixels = phases * self.columns.target

        def fits(rows: int, images: int) -> bool:
            lines = self.g.kernel[0] * self.rows.extent(rows)
            source = lines * self.pitch * self.g.sources * 4
            target = rows * pixels * self.width * 4
            return source * images <= _SOURCE_BYTES and target * images <= _TARGET_BYTES

        rows = next((n for n in range(count, 1, -1) if fits(n, 1)), 1)
        rows = ceil_div(count, ceil_div(count, rows))
        images = 1
        if rows == count and self.g.groups == 1 and self.g.is_flat:
            most = self._expected_images() // self.cpu.cores
            while images * 2 <= most and fits(rows, images * 2):
                images *= 2
        return rows, images

    def _tile_images(self) -> int:
        """Return how many images share a tile, where rows are short."""
        most = min(self.pixels // self.columns.count(), self.block_images)
        return 1 << (max(1, most).bit_length() - 1)

    def _task_panels(self) -> int:
        """Return how many panels a task has."""
        blocks = ceil_div(self._expected_images(), self.block_images) * self.row_blocks
        wanted = ceil_div(4 * self.cpu.cores, blocks)
        return ceil_div(self.panels, min(self.panels, wanted))

    def _expected_images(self) -> int:
        """Return the number of images, or of a symbolic number what the work is divided for."""
        if isinstance(self.g.images, int):
            return self.g.images
        return _EXPECTED_IMAGES * self.g.groups * self.g.slices.target

    def at_most(self, size: int, extent: Extent, start):
        """Return how many of a block are left."""
        if size == 1 or (isinstance(extent, int) and extent % size == 0):
            return const(size)
        return bind(tirx.min(const(size), extent - start))

    def stretch(self, k):
        """Return first and number of the source channels of a stretch."""
        first = bind(k * self.depth)
        return first, self.at_most(self.depth, self.g.sources, first)
