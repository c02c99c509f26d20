"""Matrix products that are not stored: an element-wise function consumes them strip by strip, while
they are in a cache near the processor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import tvm.tirx.script.builder as T
from tvm import tirx

from ...target import CPU
from ..language import builder as b
from ..language.builder import bind
from ..language.extents import LINE
from ..language.halves import Tensor, widens_slowly
from ._generator import Generator
from ._plans import PackedPlan
from ._ways import is_in_one_thread
from .matmul import Matmul
from .plan import packed_plan, plan
from .tile import Ahead, lines_of


@dataclass(frozen=True)
class Consumer:
    """A function of the elements of a product.

    Attributes
    ----------
    emit : Callable
        Emits the statements for an element, given its index in the flat product (int64) and its
        value. They may be in a vectorized loop.
    streams : Sequence[tirx.Buffer]
        The flat buffers that are read at the index of the element.
    """

    emit: Callable[[tirx.PrimExpr, tirx.PrimExpr], None]
    streams: Sequence[tirx.Buffer] = ()


def is_consumable(product: Matmul, cpu: CPU) -> bool:
    """Tell whether :func:`consumed` supports a product: one of static extents, whose second factor
    is packed, and each sum of which is complete within a tile."""
    if not product.is_static or product.batch != 1 or product.columns < 2:
        return False
    return product.depth <= cpu.tuning.tiles.depth and plan(product, cpu).way == "packed"


def consumed(
    product: Matmul,
    cpu: CPU,
    params: Sequence[tuple[str, Sequence[int], str]],
    consumer: Callable[..., Consumer],
) -> tirx.PrimFunc:
    """Return a function of A, B and the tensors of a consumer.

    Each element of the product is the same sum as in :func:`.matmul.matmul`.

    Parameters
    ----------
    product : Matmul
        The product, for which :func:`is_consumable` holds.
    cpu : CPU
        The target CPU.
    params : Sequence[tuple[str, Sequence[int], str]]
        The names, shapes and dtypes of the consumer's tensors.
    consumer : Callable
        Takes a flat buffer for each of these tensors, and returns a :class:`Consumer`. Elements are
        independent: they come in any order, and in several threads.
    """
    is_small = is_in_one_thread(product, cpu.tuning)
    own = replace(cpu, cores=1) if is_small else cpu

    def body(a: tirx.Buffer, bb: tirx.Buffer, *tensors: tirx.Buffer) -> None:
        plan = packed_plan(product, own, is_stored=False, copies_a=widens_slowly(a))
        with b.one_thread(is_small):
            _Consumed(plan, consumer(*tensors)).emit(a, bb, None)

    factors = b.floats("AB", product.shapes()[:2])
    return b.prim_func("matmul_consumed", [*factors, *params], body)


class _Consumed(Generator):
    """A generator of a product that is consumed.

    The rows of a strip are computed panel by panel, and then consumed as long rows. What the
    consumer reads there is prefetched meanwhile.

    Parameters
    ----------
    plan : PackedPlan
        The plan of the product.
    consumer : Consumer
        The consumer.
    """

    def __init__(self, plan: PackedPlan, consumer: Consumer):
        super().__init__(plan)
        self._consumer = consumer

    def _block(
        self,
        read: Callable,
        panels: tuple,
        c: Tensor | None,
        c0: tirx.PrimExpr,
        strips: tuple,
        columns: tuple,
        depth: tuple,
        among: tuple | None = None,
    ) -> None:
        rows, height = self.p.rows, self.tile_rows
        pitch = self.blocks()[1] * self.width + LINE
        # Rows at distances of 4 KB would share few sets of a cache.
        strip = b.scratch(height * pitch)
        first = bind(columns[0] * self.width)
        number = bind(tirx.min(columns[1] * self.width, b.const(self.p.columns)) - first)
        with b.serial(*strips) as i:
            with panels[0].each(panels[1], columns, depth[:2]) as (j, panel, _):
                place = (strip, bind((j - columns[0]) * self.width), pitch)
                streams = self._streams(i * height, j * self.width)

                def tiles(
                    numbers: list,
                    i: tirx.PrimExpr = i,
                    panel: tuple[tirx.Buffer, tirx.PrimExpr] = panel,
                    place: tuple[tirx.Buffer, tirx.PrimExpr, int] = place,
                    streams: list[Ahead] = streams,
                ) -> None:
                    def tile(row: tirx.PrimExpr, offsets: range) -> None:
                        rows = (read(bind(row)), offsets)
                        ahead = self.spread(offsets, numbers, streams)
                        self._part(rows, (panel, len(numbers)), place, (depth[1], ahead))

                    self._strip(i, tile)

                self._whole_or_part(j, tiles)
            top = bind(i * height)
            with b.serial(0, bind(tirx.min(b.const(height), rows - top))) as row:
                self._consume((top + row) * self.p.columns + first, (strip, row * pitch), number)

    def _streams(self, row: tirx.PrimExpr, column: tirx.PrimExpr) -> list[Ahead]:
        """Return prefetches of the elements at the place of a tile, which may be beyond the last
        one."""
        columns = self.p.columns
        start = bind(row * columns + column)
        return [
            lines_of(buffer, start, columns, self.tile_rows, self.width)
            for buffer in self._consumer.streams
        ]

    def _part(
        self,
        rows: tuple[Callable, range],
        columns: tuple[tuple[tirx.Buffer, tirx.PrimExpr], int],
        place: tuple,
        depth: tuple,
    ) -> None:
        """Emit the tile of a strip in a panel.

        ``place`` holds the buffer of the strip, the offset of the panel in it, and the distance of
        rows; ``depth`` the number of steps, and the prefetches that are spread over them.
        """
        (strip, at, pitch), (size, ahead) = place, depth
        lanes = self.vectors.lanes
        self._sum(
            rows,
            columns,
            size,
            lambda i, v: (strip, at + i * pitch + v * lanes, None),
            add=False,
            ahead=ahead,
        )

    def _consume(self, start: tirx.PrimExpr, row: tuple, number: tirx.PrimExpr) -> None:
        """Emit the consumption of a row of a strip; ``row`` holds its buffer and its offset.

        Indices of int32 may overflow as far as LLVM knows, which then gathers vectors element by
        element.
        """
        start, own, number = (bind(tirx.Cast("int64", x)) for x in (start, row[1], number))
        zero, lanes = (tirx.IntImm("int64", x) for x in (0, self.vectors.lanes))
        vectors = bind(number // lanes)

        def consume(at: tirx.PrimExpr) -> None:
            self._consumer.emit(start + at, row[0][own + at])

        with T.serial(zero, vectors) as i:
            place = bind(i * lanes)
            with T.vectorized(zero, lanes) as lane:
                consume(place + lane)
        with T.serial(vectors * lanes, number) as at:
            consume(at)
