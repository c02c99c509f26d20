"""Tiles of images for Winograd's minimal filtering, and their transforms.

A tile is a rectangle of results. With a dilation of d, its results, and the elements that they are
computed from, are d apart. Then the rows form d interleaved images, and their tiles are numbered
one image after the other. Along a row, tiles of neighbouring columns follow each other.

The lanes of a vector are channels in all transforms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tvm import tirx

from ..language import builder as b
from ..language.builder import Extent, Vectors, bind, ceil_div, const
from ._channels_last import Block, pack_channels
from ._winograd_transforms import Matrix, Transform, transform_of
from .geometry import Conv2d, Windows


@dataclass(frozen=True)
class Tiles:
    """The tiles along an axis.

    Attributes
    ----------
    windows : Windows
        The windows, with a stride of 1.
    size : int
        The results of a tile.
    apart : int
        The distance between the results of a tile.
    """

    windows: Windows
    size: int
    apart: int

    @staticmethod
    def of(windows: Windows, size: int) -> Tiles:
        """Return the tiles of a convolution."""
        return Tiles(windows, size, windows.dilation if windows.kernel > 1 else 1)

    @property
    def of_results(self) -> Tiles:
        """The same tiles of the results themselves."""
        return replace(self, windows=Windows(self.windows.number, 1, 1, 0, 0, 1))

    # Rows

    @property
    def phases(self) -> int:
        """The number of interleaved images."""
        return min(self.apart, self.windows.number)

    @property
    def tall(self) -> int:
        """The number of rows of tiles of an interleaved image."""
        return ceil_div(ceil_div(self.windows.number, self.apart), self.size)

    @property
    def rows(self) -> Windows:
        """The windows of the first interleaved image, in whole tiles."""
        missing = self.tall * self.size * self.apart - self.windows.number
        return replace(
            self.windows,
            stride=self.apart,
            dilation=self.apart,
            after=self.windows.after + missing,
        )

    # Columns

    @property
    def wide(self) -> int:
        """The number of tiles along a row."""
        whole, rest = divmod(self.windows.number, self.size * self.apart)
        return whole * self.apart + min(self.apart, rest)

    @property
    def columns(self) -> Windows:
        """The windows of all tiles of a row."""
        whole, rest = divmod(self.windows.number, self.size * self.apart)
        number = whole * self.size * self.apart
        if rest:
            number += min(self.apart, rest) + (self.size - 1) * self.apart
        return replace(self.windows, after=self.windows.after + number - self.windows.number)

    def column(self, tile: tirx.PrimExpr) -> tirx.PrimExpr:
        """Return the first column of a tile of a row."""
        if self.apart == 1:
            return bind(tile * self.size)
        return bind(tile // self.apart * (self.size * self.apart) + tile % self.apart)


@dataclass(frozen=True)
class Squares:
    """The squares of a convolution of images: tiles along both axes, and their transforms.

    Attributes
    ----------
    height, width : Tiles
        The tiles of rows and of columns.
    down, across : Transform
        The transforms of rows and of columns.
    """

    height: Tiles
    width: Tiles
    down: Transform
    across: Transform

    @staticmethod
    def of(conv: Conv2d, square: int) -> Squares:
        """Return the squares of ``square`` results along axes of three taps."""
        results = {1: 1, 3: square}
        down, across = (transform_of(results.get(taps, 2), taps) for taps in conv.kernel)
        height, width = Tiles.of(conv.height, down.results), Tiles.of(conv.width, across.results)
        return Squares(height, width, down, across)

    @property
    def cells(self) -> int:
        """The elements of a square, each of which has a product."""
        return self.down.side * self.across.side

    @property
    def tall(self) -> int:
        """The number of rows of squares of an interleaved image."""
        return self.height.tall

    @property
    def wide(self) -> int:
        """The number of squares of a row."""
        return self.width.wide

    @property
    def of_data(self) -> tuple[Matrix, Matrix]:
        """The matrices of the transform of the data."""
        return self.down.data, self.across.data

    @property
    def of_weight(self) -> tuple[Matrix, Matrix]:
        """The matrices of the transform of the weight."""
        return self.down.weight, self.across.weight

    @property
    def of_result(self) -> tuple[Matrix, Matrix]:
        """The matrices of the transform of products to results."""
        return self.down.result, self.across.result

    # The transforms of a weight gradient are the transposed ones of the convolution.

    @property
    def of_grads(self) -> tuple[Matrix, Matrix]:
        """The matrices of the transform of the output gradient."""
        return transposed(self.down.result), transposed(self.across.result)

    @property
    def of_sums(self) -> tuple[Matrix, Matrix]:
        """The matrices of the transform of products to the gradient of the weight."""
        return transposed(self.down.weight), transposed(self.across.weight)

    def image(self, index: Extent) -> tuple[tirx.PrimExpr, tirx.PrimExpr]:
        """Return an image, and the index of one of its interleaved images."""
        phases = self.height.phases
        if phases == 1:
            return bind(index), const(0)
        return bind(index // phases), bind(index % phases)

    def as_text(self) -> str:
        """Return the sizes as text."""
        of = f"{self.down.results} x {self.across.results} results"
        return f"{self.tall} x {self.wide} of {of}, {self.cells} products each"


@dataclass(frozen=True)
class Source:
    """An image with its channels and tiles.

    Attributes
    ----------
    buffer : tirx.Buffer
        The images, NCHW or NCDHW.
    plane : tirx.PrimExpr
        The index of the plane of the image's first channel.
    distance : int
        The stride of the channels, in planes.
    channels : int
        The number of channels.
    height, width : Tiles
        The tiles.
    phase : tirx.PrimExpr
        The index of the interleaved image.
    """

    buffer: tirx.Buffer
    plane: tirx.PrimExpr
    distance: int
    channels: int
    height: Tiles
    width: Tiles
    phase: tirx.PrimExpr


class Transforms:
    """The transforms of tiles.

    Parameters
    ----------
    vectors : Vectors
        The vectors.
    """

    def __init__(self, vectors: Vectors):
        self.vectors = vectors

    def transform(
        self,
        source: Source,
        matrices: tuple[Matrix, Matrix],
        rows: tuple[tirx.PrimExpr, Extent, int],
        target: tuple[tirx.Buffer, tirx.PrimExpr, int, Extent],
    ) -> None:
        """Multiply the elements of the tiles of some rows of an image by a matrix from the left,
        and by the transpose of another from the right; clear vectors of channels that do not exist.

        Parameters
        ----------
        source : Source
            The image.
        matrices : tuple
            The matrices, with a column for each element along the side of a tile.
        rows : tuple
            The first row of tiles, the number of rows, and its maximum.
        target : tuple
            A buffer ``[cell][tile][channel]``, the offset of the first tile, the stride of the
            tiles, and the stride of the cells.
        """
        row, number, most = rows
        buffer, first, pixel, plane = target
        lanes, height, width = self.vectors.lanes, source.height, source.width
        halo = height.windows.kernel - 1
        columns = width.columns.span(width.columns.number)
        packed = b.scratch((most * height.size + halo) * columns * lanes)
        with b.serial(0, ceil_div(source.channels, lanes)) as block:
            channel = bind(block * lanes)
            pack_channels(
                self.vectors,
                width.columns,
                height.rows,
                block=Block(source.buffer, source.plane, channel, source.channels, source.distance),
                rows=(bind(row * height.size), bind(number * height.size + halo)),
                target=(packed, const(0), lanes),
                offset=source.phase if height.phases > 1 else None,
            )
            with b.serial(0, number) as i, b.serial(0, width.wide) as j:
                corner = bind((i * (height.size * columns) + width.column(j)) * lanes)
                at = bind(first + (i * width.wide + j) * pixel + channel)
                elements = [
                    [
                        bind(
                            self.vectors.load(
                                packed, corner + (y * columns + x * width.apart) * lanes
                            )
                        )
                        for x in range(len(matrices[1][0]))
                    ]
                    for y in range(len(matrices[0][0]))
                ]
                self.both(
                    matrices,
                    elements,
                    lambda cell, value, at=at: self.vectors.store(buffer, at + cell * plane, value),
                )
        channels = ceil_div(source.channels, lanes) * lanes
        if channels == pixel:
            return
        tiles, cells = number * width.wide, len(matrices[0]) * len(matrices[1])
        with b.serial(0, cells) as cell, b.serial(0, tiles) as tile:
            start = first + cell * plane + tile * pixel + channels
            b.clear(buffer, bind(start), pixel - channels)

    def cells(
        self, matrices: tuple[Matrix, Matrix], buffer: tirx.Buffer, at: tirx.PrimExpr, plane: int
    ) -> list[list]:
        """Load the vectors that :meth:`both` multiplies by matrices, ``plane`` apart."""
        tall, wide = (len(matrix[0]) for matrix in matrices)
        return [
            [bind(self.vectors.load(buffer, at + (y * wide + x) * plane)) for x in range(wide)]
            for y in range(tall)
        ]

    def both(
        self,
        matrices: tuple[Matrix, Matrix],
        elements: Sequence[Sequence[tirx.PrimExpr]],
        store: Callable,
    ) -> None:
        """Multiply a rectangle of vectors by a matrix from the left and by the transpose of another
        from the right."""
        left, right = matrices
        columns = [
            [self._combined(row, column) for row in left] for column in zip(*elements, strict=True)
        ]
        for y in range(len(left)):
            across = [column[y] for column in columns]
            for x, row in enumerate(right):
                store(y * len(right) + x, self._combined(row, across))

    def _combined(self, row: tuple[float, ...], vectors: Sequence[tirx.PrimExpr]) -> tirx.PrimExpr:
        """Return the linear combination of vectors with the factors of a row."""
        terms = [pair for pair in zip(row, vectors, strict=True) if pair[0]]
        # A sum that begins with a positive factor needs no negation.
        first = next((i for i, (factor, _) in enumerate(terms) if factor > 0), 0)
        terms.insert(0, terms.pop(first))
        total = None
        for factor, vector in terms:
            term = vector if abs(factor) == 1 else vector * self.vectors.splat(abs(factor))
            if total is None:
                total = term if factor > 0 else self.vectors.splat(0) - term
            else:
                total = total + term if factor > 0 else total - term
        return bind(total)


def transposed(matrix: Matrix) -> Matrix:
    """Return the transpose of a matrix."""
    return tuple(zip(*matrix, strict=True))


def apart(size: int) -> int:
    """Return a stride for planes of ``size`` elements that is an odd number of cache lines.

    With other strides, simultaneous stores to many planes would often map to the same set of the
    cache.
    """
    return (ceil_div(size, 16) | 1) * 16


def balanced(count: int, most: int) -> int:
    """Return a tile height up to ``most`` that wastes few rows."""
    sizes = range(most, max(1, most // 2) - 1, -1)
    return min(sizes, key=lambda size: ceil_div(count, size) * (size + 1))
