"""What the sums over images are divided into: chunks for the cache, and ranges of channels for the threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx

from . import builder as b
from .builder import Extent, bind, ceil_div, const


@dataclass(frozen=True)
class Chunks:
    """Images and their rows in chunks: of all rows of some images, or of some rows of one.

    Attributes
    ----------
    batch : int or tirx.PrimExpr
        The number of all images.
    height : int
        The number of all rows of an image.
    images, rows : int
        How many a chunk has; the last one may have less.
    """

    batch: Extent
    height: int
    images: int
    rows: int

    @staticmethod
    def of_bytes(batch: Extent, height: int, size: Callable[[int], int], most: int) -> Chunks:
        """Return chunks of equal size, of which none is larger than ``most`` bytes, if a row is not.

        ``size`` tells how many bytes a number of rows of one image has.
        """
        if size(height) <= most:
            images = most // size(height)
            if isinstance(batch, int):
                images = ceil_div(batch, ceil_div(batch, images))
            return Chunks(batch, height, images, height)
        rows = max([1, *(number for number in range(1, height) if size(number) <= most)])
        return Chunks(batch, height, 1, ceil_div(height, ceil_div(height, rows)))

    @property
    def is_one(self) -> bool:
        """Whether all there is is one chunk, and this is known."""
        return isinstance(self.batch, int) and (self.batch, self.height) == (self.images, self.rows)

    def each(self, emit: Callable[[Chunk], None]) -> None:
        """Emit what is done with a chunk."""
        with b.serial(0, ceil_div(self.batch, self.images)) as i:
            image = bind(i * self.images)
            images = self._left(self.batch, self.images, image)
            with b.serial(0, ceil_div(self.height, self.rows)) as j:
                row = bind(j * self.rows)
                emit(Chunk(self, image, images, row, self._left(self.height, self.rows, row)))

    @staticmethod
    def _left(extent: Extent, size: int, start) -> Extent:
        if isinstance(extent, int) and extent % size == 0:
            return size
        return bind(tirx.min(const(size), extent - start))


@dataclass(frozen=True)
class Chunk:
    """The first image and row of a chunk, and how many it has."""

    chunks: Chunks
    image: tirx.PrimExpr
    images: Extent
    row: tirx.PrimExpr
    rows: Extent

    @property
    def is_first(self):
        return tirx.all(tirx.EQ(self.image, const(0)), tirx.EQ(self.row, const(0)))

    @property
    def is_last(self):
        return tirx.all(
            self.image + self.images >= self.chunks.batch,
            self.row + self.rows >= self.chunks.height,
        )


def share(index, number: int, blocks: int):
    """Return the range of blocks that is the share of one among a number of threads."""
    return bind(index * blocks // number), bind((index + 1) * blocks // number)


def whole_or_rest(index, extent: int, size: int, emit: Callable[[int], None]) -> None:
    """Emit what is done with a block of a size, and with the last one, which may be smaller."""
    rest = extent % size
    if rest == 0:
        emit(size)
    elif extent < size:
        emit(rest)
    else:
        b.either(index < extent // size, lambda: emit(size), lambda: emit(rest))


def unless_empty(
    batch: Extent, dw, size: int, vectors: b.Vectors, emit: Callable[[], None]
) -> None:
    """Emit a sum over images; that of none is 0."""

    def clear() -> None:
        vectors.each(size, lambda i, number: vectors.store(dw, i, vectors.splat(0), number))

    if isinstance(batch, int):
        emit()
    else:
        b.either(batch > 0, emit, clear)
