"""Copies of the rows of queries, keys and values: panels for scores, and rows of whole vectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tvm import tirx

from ..language import builder as b
from ..language.builder import Extent, Vectors, as_expr, bind, ceil_div, const
from ..language.extents import LINE
from ..language.halves import Half
from .plan import AttentionPlan

#: The elements up to which rows that are not next to each other are read in place.
_CLOSE = 16384


class Panels(NamedTuple):
    """Panels of keys.

    Attributes
    ----------
    buffer : tirx.Buffer
        The panels.
    scale : float, optional
        A factor of products with them; None if they have it, or there is none.
    """

    buffer: tirx.Buffer
    scale: float | None = None


class Copies:
    """Copies of rows for products of elements.

    Parameters
    ----------
    plan : AttentionPlan
        The sizes of blocks and tiles.
    """

    def __init__(self, plan: AttentionPlan):
        self.plan, self.vectors = plan, Vectors(plan.lanes)

    def pack_panels(
        self,
        source: tuple,
        extent: Extent,
        features: int,
        loop: Callable,
        scale: float | None = None,
    ) -> Panels:
        """Emit a copy of rows of features as panels, ``[panel][feature][row]``, padded with zeros
        and multiplied by a factor.

        ``source`` is a buffer, the offset of the first row, the stride of the rows, and the
        stride of the features if it is not 1.
        """
        vectors, lanes, width = self.vectors, self.vectors.lanes, self.plan.width
        buffer, start, step, *across = source
        panels = b.scratch(ceil_div(extent, width) * (features * width))
        if across:
            self._pack_columns(
                (buffer, start, *across), extent, features, loop=loop, scale=scale, panels=panels
            )
            return Panels(panels)
        with loop(0, ceil_div(extent, width)) as j, b.serial(0, self.plan.tile_vectors) as v:
            row = bind(j * width + v * lanes)
            base = bind(j * (features * width) + v * lanes)
            left = self._left(extent, row)
            vectors.copy_transposed(
                (buffer, bind(start + tirx.min(row, as_expr(extent) - 1) * step), step),
                left,
                features,
                target=panels,
                place=lambda k: base + k * width,
                scale=scale,
                strides=(width,),
            )
        return Panels(panels)

    def queries_of(self, source: tuple, rows: Extent, features: int) -> tuple:
        """Return the rows of a block of queries as the first factor of :meth:`.Blocks.scores`.

        ``source`` and the result are a buffer, the offset of the first row, and the stride of the
        rows.
        """
        return source

    def factors_of(
        self, source: tuple, extent: Extent, features: int, loop: Callable
    ) -> tuple[tuple, tuple]:
        """Return rows of all queries as the first factor of :meth:`.Blocks.scores`, and as the
        second one of :meth:`.Blocks.accumulate_transposed`.

        ``source`` and the results are as those of :meth:`rows_of`.
        """
        rows = self.rows_of(source, extent, features, loop)
        return rows, rows

    def _pack_columns(
        self,
        source: tuple,
        extent: Extent,
        features: int,
        loop: Callable,
        scale: float | None,
        panels: tirx.Buffer,
    ) -> None:
        """Emit the copy of :meth:`pack_panels` from features of rows that are next to each
        other.

        ``source`` is a buffer, the offset of the first row, and the stride of the features.
        """
        vectors, lanes, width = self.vectors, self.vectors.lanes, self.plan.width
        buffer, start, across = source
        with loop(0, ceil_div(extent, width)) as j:
            first = bind(j * width)
            left = [self._left(extent, first + v * lanes) for v in range(self.plan.tile_vectors)]
            with b.serial(0, features) as k:
                base = bind(start + k * across + first)
                to = bind((j * features + k) * width)
                for v, number in enumerate(left):
                    value = vectors.load(buffer, base + v * lanes, number)
                    value = value if scale is None else value * vectors.splat(scale)
                    vectors.store(panels, to + v * lanes, value)

    def _left(self, extent: Extent, row: Extent) -> Extent | None:
        """Return the number of rows of a vector from a row on; None if it is always whole."""
        if isinstance(extent, int) and extent % self.plan.width == 0:
            return None
        return bind(tirx.max(const(0), tirx.min(const(self.vectors.lanes), extent - row)))

    def rows_of(
        self, source: tuple, extent: Extent, features: int, loop: Callable = b.serial
    ) -> tuple:
        """Return rows of features from which whole vectors can be loaded: rows of a tensor, or of
        a copy that is padded with zeros.

        ``source`` and the result are a buffer, the offset of the first row, and the stride of the
        rows; ``source`` also has the stride of the features if it is not 1.
        """
        if self.has_whole_vectors(source, extent, features):
            return source
        vectors, pitch = self.vectors, self.plan.padded(features)
        target = b.scratch(extent * pitch)
        buffer, start, step, *across = source
        if across:
            lanes = vectors.lanes
            with loop(0, pitch // lanes) as j:
                first = bind(j * lanes)
                left = None
                if features % lanes:
                    left = bind(tirx.min(const(lanes), features - first))
                vectors.copy_transposed(
                    (buffer, bind(start + first * across[0]), across[0]),
                    left,
                    extent,
                    target,
                    lambda k: k * pitch + first,
                    strides=(pitch,),
                )
            return target, const(0), pitch
        with loop(0, extent) as row:
            base, to = bind(start + row * step), bind(row * pitch)
            for line in range(0, features, LINE) if self.plan.ahead else ():
                b.prefetch(buffer, base + self.plan.ahead * step + line, level=1)

            def part(
                k: Extent, number: Extent | None, base: Extent = base, to: Extent = to
            ) -> None:
                vectors.store(target, to + k, vectors.load(buffer, base + k, number))

            vectors.each(features, part)
        return target, const(0), pitch

    def has_whole_vectors(self, source: tuple, extent: Extent, features: int) -> bool:
        """Tell whether rows of a tensor are whole vectors of float32, close together in memory."""
        buffer, _, step, *across = source
        if across or isinstance(buffer, Half) or features % self.vectors.lanes:
            return False
        return step == features or (isinstance(extent, int) and extent * step <= _CLOSE)

    def unpack_rows(
        self, source: tuple, target: tuple, extent: Extent, features: int, loop: Callable
    ) -> None:
        """Emit a copy of padded rows to rows of features.

        ``source`` and ``target`` are a buffer, the offset of the first row, and the stride of the
        rows; ``target`` also has the stride of the features if it is not 1.
        """
        vectors, lanes = self.vectors, self.vectors.lanes
        (own, first, pitch), (buffer, start, step, *across) = source, target
        if across:
            with loop(0, ceil_div(extent, lanes)) as j:
                row = bind(j * lanes)
                left = None
                if not (isinstance(extent, int) and extent % lanes == 0):
                    left = bind(tirx.min(const(lanes), extent - row))
                vectors.copy_transposed(
                    (own, bind(first + row * pitch), pitch),
                    left,
                    features,
                    buffer,
                    lambda k: start + k * across[0] + row,
                    stored=left,
                    strides=(across[0],),
                )
            return
        with loop(0, extent) as row:
            base, to = bind(first + row * pitch), bind(start + row * step)

            def part(
                k: Extent, number: Extent | None, base: Extent = base, to: Extent = to
            ) -> None:
                vectors.store(buffer, to + k, vectors.load(own, base + k), number)

            vectors.each(features, part)
