"""Partition of sums over images: chunks for the cache, and ranges of channels for the threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx

from ..language import builder as b
from ..language.builder import Extent, bind, ceil_div, const
from ..language.halves import Tensor
from ..language.plans import extent_as_text


@dataclass(frozen=True)
class Chunks:
    """A partition of a batch into chunks: all rows of several images, or some rows of one image.

    Attributes
    ----------
    batch : int or tirx.PrimExpr
        The number of images.
    height : int
        The number of rows of an image.
    images, rows : int
        The number of images and of rows in a chunk; the last chunk may have fewer.
    """

    batch: Extent
    height: int
    images: int
    rows: int

    @staticmethod
    def of_bytes(batch: Extent, height: int, size: Callable[[int], int], most: int) -> Chunks:
        """Return chunks of nearly equal size, each of at most ``most`` bytes or of a single row.

        ``size(rows)`` returns the number of bytes of that many rows of one image.
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
        """Whether a single chunk is known to cover all images."""
        return isinstance(self.batch, int) and (self.batch, self.height) == (self.images, self.rows)

    @property
    def number(self) -> Extent:
        """The number of chunks."""
        return ceil_div(self.batch, self.images) * ceil_div(self.height, self.rows)

    def as_text(self) -> str:
        """Return the size of a chunk as text."""
        if self.rows < self.height:
            return f"{self.rows} of {self.height} rows of an image"
        return f"{self.images} images of {extent_as_text(self.batch)}"

    def at(self, index: tirx.PrimExpr) -> Chunk:
        """Return a chunk by its number."""
        of_image = ceil_div(self.height, self.rows)
        image = bind(index // of_image * self.images)
        row = bind(index % of_image * self.rows)
        images = self._left(self.batch, self.images, image)
        return Chunk(self, image, images, row, self._left(self.height, self.rows, row))

    def each(self, emit: Callable[[Chunk], None]) -> None:
        """Emit the loops over the chunks, with ``emit(chunk)`` as their body."""
        with b.serial(0, ceil_div(self.batch, self.images)) as i:
            image = bind(i * self.images)
            images = self._left(self.batch, self.images, image)
            with b.serial(0, ceil_div(self.height, self.rows)) as j:
                row = bind(j * self.rows)
                emit(Chunk(self, image, images, row, self._left(self.height, self.rows, row)))

    @staticmethod
    def _left(extent: Extent, size: int, start: tirx.PrimExpr) -> Extent:
        if isinstance(extent, int) and extent % size == 0:
            return size
        return bind(tirx.min(const(size), extent - start))


@dataclass(frozen=True)
class Chunk:
    """The first image and row of a chunk, and its number of images and rows."""

    chunks: Chunks
    image: tirx.PrimExpr
    images: Extent
    row: tirx.PrimExpr
    rows: Extent

    @property
    def is_first(self) -> tirx.PrimExpr:
        return tirx.all(tirx.EQ(self.image, const(0)), tirx.EQ(self.row, const(0)))

    @property
    def is_last(self) -> tirx.PrimExpr:
        return tirx.all(
            self.image + self.images >= self.chunks.batch,
            self.row + self.rows >= self.chunks.height,
        )


def grid(blocks: tuple[int, int], cores: int, *, copy: float) -> tuple[int, int]:
    """Return the ranges of blocks of input and of output channels, for some threads.

    Copying a block of input channels takes as long as the products of ``copy`` blocks of output
    channels with it.
    """
    ins, outs = blocks

    def time(parts: tuple[int, int]) -> tuple[float, int]:
        by_in, by_out = parts
        return ceil_div(ins, by_in) * (ceil_div(outs, by_out) + copy), by_out

    grids = [(i, min(outs, max(1, cores // i))) for i in range(1, min(cores, ins) + 1)]
    return min(grids, key=time)


def share(index: tirx.PrimExpr, number: int, blocks: int) -> tuple[tirx.PrimExpr, tirx.PrimExpr]:
    """Return the range of blocks, as (start, stop), that thread ``index`` of ``number`` threads
    processes."""
    return bind(index * blocks // number), bind((index + 1) * blocks // number)


def whole_or_rest(
    index: tirx.PrimExpr, extent: int, size: int, emit: Callable[[int], None]
) -> None:
    """Emit the code for a block of ``size`` elements, and for a smaller last block if there is
    one."""
    rest = extent % size
    if rest == 0:
        emit(size)
    elif extent < size:
        emit(rest)
    else:
        b.either(index < extent // size, lambda: emit(size), lambda: emit(rest))


def unless_empty(
    batch: Extent, dw: Tensor, size: int, vectors: b.Vectors, emit: Callable[[], None]
) -> None:
    """Emit a sum over images; the sum over an empty batch is 0."""

    def clear() -> None:
        vectors.each(size, lambda i, number: vectors.store(dw, i, vectors.splat(0), number))

    if isinstance(batch, int):
        emit()
    else:
        b.either(batch > 0, emit, clear)
