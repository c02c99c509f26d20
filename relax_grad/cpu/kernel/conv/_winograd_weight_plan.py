"""Plans of the weight gradient of convolutions by Winograd's minimal filtering."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

from ...kernel_limits import Convolutions
from ...target import CPU
from ..language.builder import Extent, ceil_div
from ..language.plans import Plan
from ._chunks import Chunks
from ._winograd_plan import parts_of
from ._winograd_tiles import Squares, apart, balanced
from .geometry import Conv2d, Conv3d, Windows

#: The bytes of the chunk of one thread for each byte of the sums, which a chunk reads and writes.
_OWN_SHARE = 4

#: The most parts, and the bytes of all squares for each byte of their sums at least.
_PARTS, _LEAST_SQUARES = 8, 10

#: The maximum number of chunks to try, of which the best-balanced number is chosen; and the time of
#: copying the elements around a row of squares, relative to the time of the row.
_MOST_CHUNKS, _ROW_COST = 256, 0.1

#: The most rows of squares that a task transforms.
_TASK_ROWS = 4

#: Expected number of images of a symbolic batch.
_EXPECTED_IMAGES = 8

#: Squares of plain images whose products are summed before they are added to the others.
_STRETCH = 256


@dataclass(frozen=True)
class WinogradWeightPlan(Plan):
    """The plan of a weight gradient.

    Attributes
    ----------
    conv : Conv2d
        The convolution of images.
    depth : Windows
        The axis along which the results of images are added.
    squares : Squares
        The squares of results, and their transforms.
    lanes, cores : int
        The elements of a vector, and the threads that share the work.
    tile_rows, tile_vectors : int
        The output channels and the vectors of input channels of a tile of a product.
    stretch : int
        The squares whose products are summed before they are added to the others, which makes
        rounding errors smaller; 0 for all.
    parts : int
        The parts of the squares, whose sums are added at the end.
    chunks : Chunks
        The images and rows of squares that are transformed at once.
    """

    conv: Conv2d
    depth: Windows
    squares: Squares
    lanes: int
    cores: int
    tile_rows: int
    tile_vectors: int
    stretch: int
    parts: int
    chunks: Chunks

    @property
    def sums_own(self) -> bool:
        """Whether each thread transforms and sums the squares of its parts: fewer parts than
        threads would leave some of these idle."""
        return self.parts > 1 and self.parts >= self.cores

    @property
    def matrices(self) -> int:
        """The products of a square, with each tap along the depth."""
        return self.depth.kernel * self.squares.cells

    @property
    def panel(self) -> int:
        """The input channels of a panel."""
        return self.tile_vectors * self.lanes

    @property
    def panels(self) -> int:
        """The panels of input channels."""
        return ceil_div(self.conv.in_channels, self.panel)

    @property
    def ins(self) -> int:
        """The input channels, in whole panels."""
        return self.panels * self.panel

    @property
    def strips(self) -> int:
        """The strips of output channels."""
        return ceil_div(self.conv.out_channels, self.tile_rows)

    @property
    def outs(self) -> int:
        """The output channels, in whole strips and vectors."""
        return ceil_div(max(self.strips * self.tile_rows, 1), self.lanes) * self.lanes

    @cached_property
    def sum_plane(self) -> int:
        """The stride of the sums of the elements of a square."""
        return apart(self.outs * self.ins)

    @property
    def slices(self) -> int:
        """The slices of a volume that are transformed: of the data or of the result."""
        return max(self.depth.size, self.depth.number)

    @property
    def row_tasks(self) -> int:
        """The tasks that transform the rows of squares of a chunk."""
        return ceil_div(self.chunks.rows, _TASK_ROWS)

    @property
    def task_rows(self) -> int:
        """The rows of squares that a task transforms."""
        return ceil_div(self.chunks.rows, self.row_tasks)

    @property
    def transforms_of_chunk(self) -> int:
        """The tasks that transform a chunk."""
        return self.chunks.images * self.slices * self.row_tasks

    # The strides of slices and of the elements of a square, in data and output gradient.

    @property
    def in_slice(self) -> int:
        return self.chunks.images * self.chunks.rows * self.squares.wide * self.ins

    @property
    def out_slice(self) -> int:
        return self.chunks.images * self.chunks.rows * self.squares.wide * self.outs

    @cached_property
    def in_plane(self) -> int:
        return apart(self.depth.size * self.in_slice)

    @cached_property
    def out_plane(self) -> int:
        return apart(self.depth.number * self.out_slice)

    def lines(self) -> dict[str, str]:
        """Return the decisions and their values as text."""
        return {
            "squares": self.squares.as_text(),
            "tile": f"{self.tile_rows} output channels x {self.tile_vectors} vectors of input "
            "channels",
            "sums": f"{self.stretch} squares at once" if self.stretch else "all squares at once",
            "chunk": self.chunks.as_text(),
            "parts": f"{self.parts}, each summed by {'a' if self.sums_own else 'every'} thread",
        }


def winograd_weight_plan(conv: Conv2d | Conv3d, cpu: CPU, square: int) -> WinogradWeightPlan:
    """Return the plan of a weight gradient with squares of ``square`` results."""
    images, depth = parts_of(conv)
    squares, (height, vectors) = Squares.of(images, square), cpu.tuning.tiles.largest
    is_flat = depth.size == depth.number == depth.kernel == 1 and depth.is_inside
    own = WinogradWeightPlan(
        *(images, depth, squares, cpu.lanes, cpu.cores),
        tile_rows=balanced(images.out_channels, height),
        tile_vectors=min(vectors, ceil_div(images.in_channels, cpu.lanes)),
        stretch=_STRETCH if is_flat else 0,
        parts=1,
        chunks=Chunks(images.batch, squares.tall, 1, 1),
    )
    row = 4 * squares.cells * (own.ins * depth.size + own.outs * depth.number) * squares.wide
    parts, chunks = divide(
        *(images.batch, squares.height.phases, squares.tall),
        *(row, 4 * own.matrices * own.sum_plane, cpu.tuning.convolutions),
    )
    return replace(own, parts=parts, chunks=chunks)


def divide(
    batch: Extent, phases: int, height: int, row: int, sums: int, limits: Convolutions
) -> tuple[int, Chunks]:
    """Return the number of parts, and the chunks. They do not depend on the number of threads.

    Parameters
    ----------
    batch : int or tirx.PrimExpr
        The number of images.
    phases, height : int
        The number of interleaved images of each, and the rows of squares of these.
    row, sums : int
        The bytes of a row of squares, and of the sums of a part.
    limits : Convolutions
        The sizes of chunks.
    """
    least, most_own = limits.winograd_own
    is_known = isinstance(batch, int)
    images = (batch if is_known else _EXPECTED_IMAGES) * phases
    squares = images * height * row
    most = min(_PARTS, images * height, squares // (_LEAST_SQUARES * sums))
    if most < 2 or sums > most_own // 3:
        # Each chunk reads and writes all sums once, so a chunk is at least as large as the sums.
        shared_bytes, largest = limits.winograd_shared
        most = max(shared_bytes, min(sums, largest))
        return 1, Chunks.of_bytes(batch * phases, height, lambda rows: rows * row, most)
    parts = 1 << (most.bit_length() - 1)
    size = max(least, min(_OWN_SHARE * sums, most_own))
    rows = max(1, min(size // row, images * height // parts))
    # More chunks may be more even shares.
    whole, tall = rows // height, ceil_div(height, rows)
    choices = [
        *(
            Chunks(images, height, ceil_div(images, number), height)
            for number in (range(ceil_div(images, whole), images + 1)[:parts] if whole else ())
        ),
        *(
            Chunks(images, height, 1, ceil_div(height, number))
            for number in range(tall, height + 1)[: 2 * parts]
        ),
    ]
    if choices[0].number > _MOST_CHUNKS:
        best = choices[0]
    else:
        best = min(choices, key=lambda chunks: _longest(chunks, parts) + _ROW_COST / chunks.rows)
    if is_known:
        return min(parts, best.number), best
    return parts, replace(best, batch=batch * phases)


def _longest(chunks: Chunks, parts: int) -> float:
    """Return the largest share of one of two, four and eight threads, each relative to equal
    shares, on average."""
    number = chunks.number
    parts = min(parts, number)
    sizes = [
        min(chunks.images, chunks.batch - i) * min(chunks.rows, chunks.height - j)
        for i in range(0, chunks.batch, chunks.images)
        for j in range(0, chunks.height, chunks.rows)
    ]
    until = [0, *accumulate(sizes)]
    longest = []
    for threads in (2, 4, 8):
        # The runtime gives each thread but the last ones the same number of parts.
        of_thread = ceil_div(parts, threads)
        stops = [min(i * of_thread, parts) * number // parts for i in range(threads + 1)]
        shares = [until[stop] - until[start] for start, stop in pairwise(stops)]
        longest.append(max(shares) * threads / until[-1])
    return sum(longest) / len(longest)
