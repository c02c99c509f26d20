"""Matrix products with weights of 8 and 4 bits.

Each task widens the parts of the weight that it reads, in registers, while it packs them into
panels. The weight in float32 never exists in memory but for a stretch of two panels. For products
with data of bfloat16 by tiles (AMX), the widened numbers are rounded to bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tvm import tirx

from ...target import CPU
from ..language import amx
from ..language import builder as b
from ..language.builder import Extent, Vectors, as_expr, bind, ceil_div, const
from ..language.halves import Tensor, widens_slowly
from ._amx_products import TileGenerator
from ._generator import Generator
from ._plans import PackedPlan
from ._ways import nanoseconds, stretch_of
from .pairs import imported_rounding, only_first, rounded_in_order, rounded_to_pairs, squares
from .panels import Packing
from .plan import packed_plan
from .product import Matmul
from .tile import Ahead
from .tiled import Tiled, TilePacking


@dataclass(frozen=True)
class Quantized:
    """The layout of a weight ``[outputs][groups][size]``.

    Attributes
    ----------
    outputs, groups, size : int
        The rows, the groups of a row, and the numbers of a group: a multiple of the lanes of a
        vector.
    bits : int
        8 for int8, or 4 for two numbers in each element of uint8.
    zero_point : str
        The dtype of the zero points, or an empty text if there are none.
    """

    outputs: int
    groups: int
    size: int
    bits: int
    zero_point: str = ""

    @property
    def dtype(self) -> str:
        """The dtype of the weight."""
        return "int8" if self.bits == 8 else "uint8"

    @property
    def inputs(self) -> int:
        """The numbers of a row."""
        return self.groups * self.size

    def params(self) -> list[tuple]:
        """Return the parameters of a kernel: the weight, the scales, and the zero points if there
        are any."""
        of_groups = [self.outputs, self.groups]
        params = [
            ("weight", [*of_groups, self.size * self.bits // 8], self.dtype),
            ("scale", of_groups, "float32"),
        ]
        return [*params, ("zero_point", of_groups, self.zero_point)] if self.zero_point else params


def quantized_matmul(
    weight: Quantized,
    cpu: CPU,
    data: Sequence[Extent],
    result: Sequence[Extent],
    *,
    backward: bool = False,
) -> tirx.PrimFunc:
    """Return the kernel: a function of data (float32) and a weight, which sets the result to their
    product.

    The order of each sum depends on the shapes alone, not on the number of threads.

    Parameters
    ----------
    weight : Quantized
        The weight, of which ``data`` may have fewer inputs than the groups.
    cpu : CPU
        The target CPU.
    data, result : Sequence[int or tirx.PrimExpr]
        The shapes of the data and of the result. The last extents are integers.
    backward : bool
        Whether the data are multiplied by the weight, instead of by the transposed weight.
    """
    product = Matmul(b.count(data[:-1]), result[-1], data[-1], transpose_b=not backward)
    is_small = nanoseconds(product, cpu.tuning) <= cpu.tuning.tasks.one_thread_ns
    if is_small:
        cpu = replace(cpu, cores=1)

    def emit(a: Tensor, *tensors: tirx.Buffer) -> None:
        *operands, c = tensors
        with b.one_thread(is_small):
            if amx.takes_tiles(cpu, a):
                with amx.imported(), imported_rounding(cpu):
                    own = packed_plan(Tiled.of(product), cpu)
                    _TileGenerator(own, weight).emit(a, operands, c)
                return
            own = packed_plan(product, cpu, copies_a=widens_slowly(a))
            _Generator(own, weight, cpu).emit(a, operands, c)

    params = [("data", data, "float32"), *weight.params(), ("result", result, "float32")]
    return b.prim_func("quantized_matmul", params, emit)


class _Generator(Generator):
    """A generator of products with a weight, whose panels each task packs."""

    def __init__(self, plan: PackedPlan, weight: Quantized, cpu: CPU):
        self.weight, self.cpu = weight, cpu
        super().__init__(replace(plan, packs_late=True))

    def packing_of(self, plan: PackedPlan) -> Packing:
        # Transposed squares are packed as a whole.
        multiple = plan.lanes if self.p.transpose_b else plan.tiles.round
        stretch = stretch_of(
            *(self.p.depth, self.cpu.tuning, plan.vectors), multiple=multiple, is_converted=True
        )
        return _Packing(
            *(self.p, self.vectors, plan.vectors, self.weight), stretch=stretch, multiple=multiple
        )


@dataclass(frozen=True)
class _Packing(Packing):
    """Panels of a weight.

    Elements beyond the last column repeat the last ones, and are not stored in the result.
    """

    weight: Quantized

    def prefetch(self, source: tuple, start: tirx.PrimExpr, part: tuple) -> Ahead:
        """Return no prefetches: rows of a few bits are short."""
        return Ahead(0, lambda i, j: None)

    def pack(self, source: tuple, target: tuple, depth: tuple, group: int = 1) -> None:
        (operands, _, j), (panels, base, step), (k0, size) = source, target, depth
        lanes, width, vectors = self.vectors.lanes, self.width, self.vectors
        reader = _Reader(self.weight, vectors, operands)
        if not self.p.transpose_b:
            parts = [(i, v * lanes) for i in range(group) for v in range(self.tile_vectors)]
            last = const(self.weight.inputs - lanes)
            places = [reader.column(tirx.min((j + i) * width + at, last)) for i, at in parts]
            with b.serial(0, size) as k:
                row, to = reader.row(k0 + k), bind(base + k * width)
                for (i, at), place in zip(parts, places, strict=True):
                    vectors.store(panels, to + i * step + at, reader.vector(row, place))
            return
        last = const(self.weight.outputs - 1)
        with b.serial(0, group) as i, b.serial(0, self.tile_vectors) as v:
            to = bind(base + i * step + v * lanes)
            first = bind((j + i) * width + v * lanes)
            rows = [reader.row(tirx.min(first + lane, last)) for lane in range(lanes)]
            with b.serial(0, ceil_div(size, lanes)) as square:
                k = bind(square * lanes)
                place = reader.column(k0 + k)
                columns = vectors.transpose([bind(reader.vector(row, place)) for row in rows])
                for at, column in enumerate(columns):
                    vectors.store(panels, to + (k + at) * width, column)


class _TileGenerator(TileGenerator):
    """A generator of products by tiles with a weight, whose panels each task packs."""

    def __init__(self, plan: PackedPlan, weight: Quantized):
        self.weight = weight
        super().__init__(replace(plan, packs_late=True))

    def packing_of(self, plan: PackedPlan) -> Packing:
        return _TilePacking(
            *(self.p, self.vectors, plan.vectors, self.weight),
            stretch=plan.stretch,
            multiple=amx.STEPS,
        )


@dataclass(frozen=True)
class _TilePacking(TilePacking):
    """Panels of pairs of a weight, rounded to bfloat16.

    Elements beyond the last column repeat the last ones, and are not stored in the result.
    """

    p: Tiled
    weight: Quantized

    def pack_existing(self, source: tuple, target: tuple, depth: tuple, group: int) -> None:
        (operands, _, j), (panels, base, step), (k0, size) = source, target, depth
        reader, lanes = _Reader(self.weight, self.vectors, operands), self.vectors.lanes
        if self.p.transpose_b:
            self._pack_rows(reader, j, target, depth, group)
        else:
            self._pack_columns(reader, j, target, depth, group)
        if self.p.is_even:
            return
        # The last pair has one element.
        is_last = tirx.all(size > 0, tirx.EQ(k0 + size, as_expr(self.p.pairs)))
        with b.when(is_last), b.serial(0, group) as i, b.serial(0, self.tile_vectors) as v:
            at = bind(base + i * step + (size - 1) * self.width + v * lanes)
            self.vectors.store(panels, at, only_first(self.vectors.load(panels, at)))

    def _pack_rows(
        self, reader: _Reader, j: tirx.PrimExpr, target: tuple, depth: tuple, group: int
    ) -> None:
        """Emit the copy of rows of the weight as columns of pairs."""
        (panels, base, step), (k0, size), lanes = target, depth, self.vectors.lanes
        last, end = const(self.weight.outputs - 1), const(self.weight.inputs - lanes)
        with b.serial(0, group) as i, b.serial(0, self.tile_vectors) as v:
            to = bind(base + i * step + v * lanes)
            first = bind((j + i) * self.width + v * lanes)
            rows = [reader.row(tirx.min(first + lane, last)) for lane in range(lanes)]

            def pairs(
                at: int, k: tirx.PrimExpr, _: Extent | None, rows: list = rows
            ) -> tirx.PrimExpr:
                element = bind(2 * (k0 + k))
                # A second vector beyond the row is not copied.
                places = [reader.column(x) for x in (element, tirx.min(element + lanes, end))]
                low, high = (reader.vector(rows[at], place) for place in places)
                return bind(rounded_in_order(low, high))

            squares(self.vectors, size, pairs, target=panels, to=to, width=self.width)

    def _pack_columns(
        self, reader: _Reader, j: tirx.PrimExpr, target: tuple, depth: tuple, group: int
    ) -> None:
        """Emit the copy of rows of the weight as rows of pairs."""
        (panels, base, step), (k0, size), lanes = target, depth, self.vectors.lanes
        parts = [(i, v * lanes) for i in range(group) for v in range(self.tile_vectors)]
        end, last = const(self.weight.inputs - lanes), const(self.weight.outputs - 1)
        places = [reader.column(tirx.min((j + i) * self.width + at, end)) for i, at in parts]
        with b.serial(0, size) as k:
            first = bind(2 * (k0 + k))
            rows = [reader.row(row) for row in (first, tirx.min(first + 1, last))]
            to = bind(base + k * self.width)
            for (i, at), place in zip(parts, places, strict=True):
                low, high = (reader.vector(row, place) for row in rows)
                self.vectors.store(panels, to + i * step + at, bind(rounded_to_pairs(low, high)))


class _Reader:
    """Vectors along the rows of a weight, widened to float32."""

    def __init__(self, weight: Quantized, vectors: Vectors, operands: Sequence[tirx.Buffer]):
        self.weight, self.lanes = weight, vectors.lanes
        self.numbers, self.scale, *self.zero_point = operands
        count = self.lanes * weight.bits // 8
        self.bytes = Vectors(count, weight.dtype)

    def row(self, number: tirx.PrimExpr) -> tuple:
        """Bind the offsets of a row: in the groups, and in the weight."""
        of = self.weight
        row = bind(number)
        return bind(row * of.groups), bind(row * (of.inputs * of.bits // 8))

    def column(self, number: tirx.PrimExpr) -> tuple:
        """Bind the offsets within a row of a column, a multiple of the lanes."""
        column = bind(number)
        return bind(column // self.weight.size), bind(column * self.weight.bits // 8)

    def vector(self, row: tuple, column: tuple) -> tirx.PrimExpr:
        """Return the elements of a row from a column on."""
        group = bind(row[0] + column[0])
        numbers = self._numbers(self.bytes.load(self.numbers, row[1] + column[1]))
        if self.zero_point:
            zero = tirx.Cast("float32", self.zero_point[0][group])
        else:
            zero = tirx.const(0.0 if self.weight.bits == 8 else 8.0, "float32")
        if self.zero_point or self.weight.bits == 4:
            numbers = numbers - tirx.Broadcast(zero, self.lanes)
        return numbers * tirx.Broadcast(self.scale[group], self.lanes)

    def _numbers(self, loaded: tirx.PrimExpr) -> tirx.PrimExpr:
        """Widen numbers; of 4 bits, each element is repeated, and shifted by 0 and 4 bits in
        turn."""
        wide = f"int32x{self.lanes}"
        if self.weight.bits == 4:
            pairs = [const(lane // 2) for lane in range(self.lanes)]
            part = bind(loaded)
            # TVM's shuffles return no more lanes than they take.
            loaded = tirx.Cast(wide, tirx.Shuffle([part, part], pairs))
            shifts = tirx.bitwise_and(tirx.Ramp(const(0), const(4), self.lanes), self._splat(4))
            loaded = tirx.bitwise_and(tirx.shift_right(loaded, shifts), self._splat(15))
        else:
            loaded = tirx.Cast(wide, loaded)
        return tirx.Cast(f"float32x{self.lanes}", loaded)

    def _splat(self, value: int) -> tirx.PrimExpr:
        return tirx.Broadcast(const(value), self.lanes)
