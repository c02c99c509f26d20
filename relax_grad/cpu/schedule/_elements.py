"""Loops over independent elements."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import gcd, lcm

import tvm.tirx.script.builder as T
import tvm_ffi
from tvm import tirx
from tvm.ir import Range
from tvm.tirx import Ramp, Shuffle

from ...ir.compat import Analyzer, detect_linear_equation, loaded_buffer, structural_walk
from ...ir.expressions import substitute, variables
from ..kernel.language.builder import Vectors, const, either
from ..kernel.language.turned import turn
from ..squares import LANES
from ._emitter import Emitter
from ._functions import calls_in
from ._nest import Axis, analyzer, simplify, size_of

#: Operations that one thread performs in the time that a second thread takes to wake up.
SMALL = 8192

#: Pieces of a row begin at multiples of this number of elements: one or several cache lines.
LINE = 64

#: The maximum number of operands that are transposed in registers.
_TURNED = 3

#: The maximum number of bounds that the innermost loop is split at.
_BOUNDS = 6

#: The largest number of elements of an image that are enlarged from one.
_QUOTIENTS = 8

#: The longest period of divisions, in elements of 4 bytes, that is unrolled: the number of lanes of
#: a vector.
_PERIODS = 16

_DIVISIONS = (tirx.FloorDiv, tirx.FloorMod)


class Elements(Emitter):
    """A generator of loops over independent elements."""

    def emit(self) -> None:
        elements = size_of(self.axes)
        work = None if elements is None else elements * self._cost()
        is_large = work is None or work >= SMALL
        if not self.axes:
            self.element({})
            return
        crossed = self._crossed()
        if crossed is not None:
            self._tiles(crossed, is_large)
            return
        *outer, inner = self.axes
        period = self._period(inner)
        if period is not None:
            self._periodic(outer, inner, period, is_large)
            return
        rows = size_of(outer)
        is_even = (
            rows is None or rows >= 8 * self.cpu.cores or (rows > 1 and rows % self.cpu.cores == 0)
        )
        if is_large and not is_even:
            self._pieces(outer, inner)
            return
        with self.loops(outer, is_large) as at:
            self._row(inner, at)

    def _period(self, inner: Axis) -> int | None:
        """Return the number of elements after which the divisions of the innermost index repeat, or
        None.

        In an enlarged image, ``x[j // 2]``, and in a dilated one, which is 0 where ``j % 2 != 0``,
        it is 2.
        """
        periods = set()

        def visit(node: tirx.PrimExpr) -> None:
            if inner.var not in variables(node.a) or not isinstance(node.b, tirx.IntImm):
                return
            parts = detect_linear_equation(node.a, [inner.var])
            if len(parts) == 2 and isinstance(parts[0], tirx.IntImm) and int(node.b) > 1:
                periods.add(int(node.b) // gcd(int(parts[0]), int(node.b)))

        for nest in self.group.nests:
            expressions = [*nest.indices, nest.value]
            structural_walk(expressions, (_DIVISIONS, visit))
        period = lcm(*periods) if periods else 1
        narrow = min(tvm_ffi.dtype(str(access.buffer.dtype)).bits for access in self.accesses.all)
        return period if 1 < period <= _PERIODS * (32 // min(32, max(8, narrow))) else None

    def _periodic(self, outer: list[Axis], inner: Axis, period: int, is_large: bool) -> None:
        """Emit the loops with the innermost one over periods, whose elements have no divisions by
        the period.

        LLVM must not see the divisions: its vectors read ``x[j % 4]`` like ``x[j]`` on AVX-512, for
        divisors that are powers of 2 below the number of lanes.
        """
        if is_large and self._is_interleaved(inner, period):
            with self.loops(outer, parallel=True) as at:
                self._interleaved(inner, period, at)
            return
        periods = inner.extent // period

        def element(at: dict, start: tirx.PrimExpr, k: int) -> None:
            place = start * period + k
            self.element({**at, inner.var: place}, known=analyzer(self.axes[:-1]))

        rows = size_of(outer)
        is_few = is_large and rows is not None and rows < self.cpu.cores
        pieces = self.cpu.cores if is_few else 1
        piece = (periods + (pieces - 1)) // pieces
        part = Axis(tirx.Var("part", "int64"), tirx.IntImm("int64", pieces))
        with self.loops(
            [*outer, part] if is_few else outer, is_large and bool(outer or is_few)
        ) as at:
            start = T.Bind(at.pop(part.var) * piece) if is_few else tirx.IntImm("int64", 0)
            size = tirx.min(piece, periods - start) if is_few else periods
            with T.serial(0, size) as i:
                for k in range(period):
                    element(at, start + i, k)
        if inner.size is None:
            with self.loops(outer, is_large and bool(outer)) as at:
                for k in range(period - 1):
                    with T.If(k < inner.extent % period), T.Then():
                        element(at, periods, k)
        elif inner.size % period:
            with self.loops(outer, is_large and bool(outer)) as at:
                for k in range(inner.size % period):
                    element(at, tirx.IntImm("int64", inner.size // period), k)

    def _is_interleaved(self, inner: Axis, factor: int) -> bool:
        """Tell whether periods of a few elements are stored in vectors that are interleaved."""
        if factor > _QUOTIENTS or (inner.size or 0) < factor * self.cpu.lanes:
            return False
        # TVM fails on variables that are vectors of booleans.
        is_plain = all(access.stride(inner) == 1 for access in self.accesses.stores) and not any(
            str(access.buffer.dtype) == "bool" for access in self.accesses.all
        )
        return is_plain and all(map(self.is_vector, range(len(self.read))))

    def _interleaved(self, inner: Axis, factor: int, at: dict) -> None:
        """Emit the innermost loop over groups of elements with the same quotients.

        A vector for each place within a group is computed, and the vectors are interleaved. LLVM
        does so for long loops only: it unrolls short ones, and then gathers along the next loop.
        """
        lanes, elements = self.cpu.lanes, int(inner.extent)
        size = elements // factor

        zero, one = (tirx.IntImm("int64", value) for value in (0, 1))
        aligned = [
            load for load, access in self.accesses.loads.items() if access.stride(inner) == 1
        ]

        def rows_of(dtype: str, number: int) -> list[tirx.Buffer]:
            return [T.alloc_buffer([number], str(dtype), layout=None) for _ in range(factor)]

        def line(index: tirx.PrimExpr, place: dict, number: int) -> Ramp:
            """Return the indices of the elements of some groups."""
            first = substitute(index, place)
            return Ramp(first, tirx.IntImm(str(first.ty.dtype), 1), factor * number)

        def groups(start: tirx.PrimExpr, number: int) -> None:
            begin, vector = {**at, inner.var: start * factor}, Ramp(zero, one, number)
            loaded = {}
            for load in aligned:
                buffer, (index,) = loaded_buffer(load), load.indices
                whole = T.Bind(buffer[line(index, begin, number)])
                loaded[load] = rows_of(buffer.dtype, number)
                for k, row in enumerate(loaded[load]):
                    own = _shuffled([whole], range(k, number * factor, factor))
                    T.buffer_store(row, own, [vector])
            stored = {buffer: rows_of(buffer.dtype, number) for buffer in self.group.stored}
            for k in range(factor):
                with T.vectorized(0, tirx.IntImm("int64", number)) as j:
                    known = analyzer(self.axes[:-1])
                    known.bind(j, Range(0, number))
                    self.element(
                        {**at, inner.var: (start + j) * factor + k},
                        loaded={load: rows[k][j] for load, rows in loaded.items()},
                        known=known,
                        stored={buffer: (rows[k], j) for buffer, rows in stored.items()},
                    )
            order = [k * number + i for i in range(number) for k in range(factor)]
            for nest in self.group.nests:
                if nest.buffer in stored:
                    vectors = [row[vector] for row in stored[nest.buffer]]
                    index = line(nest.indices[0], begin, number)
                    T.buffer_store(nest.buffer, _shuffled(vectors, order), [index])

        with T.serial(0, tirx.IntImm("int64", size // lanes)) as i:
            groups(i * lanes, lanes)
        rest = size % lanes
        if rest > 1:
            groups(tirx.IntImm("int64", size - rest), rest)
        elif rest:
            size -= 1  # TVM has no vectors of one element
        for k in range(size * factor, elements):
            self.element({**at, inner.var: tirx.IntImm("int64", k)})

    def _row(self, inner: Axis, at: dict) -> None:
        """Emit the innermost loop, split into ranges within which the same conditions hold."""
        bounds = self._bounds(inner)
        for start, end in pairwise(bounds):
            with T.serial(start, end) as i:
                place = {**at, inner.var: i}
                if len(bounds) == 2:
                    self.element(place)
                    continue
                known = Analyzer()
                known.bind(i, Range(start, end))
                for axis in self.axes[:-1]:
                    if isinstance(at[axis.var], tirx.Var):
                        known.bind(at[axis.var], Range(0, axis.extent))
                self.element(place, known=known)

    def _bounds(self, inner: Axis) -> list:
        """Return the bounds of the ranges of an axis within which conditions do not change."""
        ends = [tirx.IntImm("int64", 0), inner.extent]
        if inner.size is None or inner.var not in self.accesses.tested:
            return ends
        turns = set()

        def visit(node: tirx.PrimExpr) -> None:
            difference = node.a - node.b
            if {inner.var} != variables(difference):
                return
            parts = detect_linear_equation(difference, [inner.var])
            if len(parts) == 2 and all(isinstance(part, tirx.IntImm) for part in parts):
                factor, rest = map(int, parts)
                if factor:
                    turns.add(_turn(factor, rest, isinstance(node, (tirx.LE, tirx.GT))))

        for nest in self.group.nests:
            structural_walk(nest.value, ((tirx.LT, tirx.LE, tirx.GT, tirx.GE), visit))
        inside = sorted(bound for bound in turns if 0 < bound < inner.size)
        if not 0 < len(inside) <= _BOUNDS:
            return ends
        bounds = [ends[0], *(tirx.IntImm("int64", bound) for bound in inside), ends[1]]
        for start, end in pairwise(bounds):
            known = analyzer(self.axes[:-1])
            known.bind(inner.var, Range.from_min_extent(start, end - start))
            if any(simplify(nest.value, known) is None for nest in self.group.nests):
                return ends
        return bounds

    def _cost(self) -> int:
        nests = self.group.nests
        return 1 + sum(4 * len(calls_in(nest.value)) + len(nest.loads) // 4 for nest in nests)

    def _pieces(self, outer: list[Axis], inner: Axis) -> None:
        """Emit the loops with each row divided among the cores, for few rows."""
        pieces, extent = self.cpu.cores, inner.extent
        piece = (extent + (pieces * LINE - 1)) // (pieces * LINE) * LINE
        if inner.size is not None:
            pieces = -(-inner.size // int(piece))
        part = Axis(tirx.Var("part", "int64"), tirx.IntImm("int64", pieces))
        with self.loops([*outer, part], parallel=True) as at:
            start = T.Bind(at.pop(part.var) * piece)
            is_exact = inner.size is not None and inner.size % int(piece) == 0
            size = piece if is_exact else tirx.min(piece, extent - start)
            with T.serial(0, size) as i:
                self.element({**at, inner.var: start + i})

    def _crossed(self) -> Axis | None:
        """Return the axis along which an operand is contiguous that is strided along the last axis,
        or None."""
        *outer, inner = self.axes
        if self.accesses.is_opaque(inner) or (inner.size or LINE) < 4:
            return None
        for access in self.accesses.loads.values():
            if access.stride(inner) in (0, 1):
                continue
            for axis in outer:
                if (
                    access.stride(axis) == 1
                    and not self.accesses.is_opaque(axis)
                    and axis.size != 1
                ):
                    return axis
        return None

    def _tiles(self, crossed: Axis, is_large: bool) -> None:
        """Emit the loops over square tiles, whose reads and writes stay in the cache."""
        *outer, inner = self.axes
        size = self.cpu.lanes
        both = (crossed, inner)
        tiles = [_divided(axis, size) for axis in both]
        outer = [tiles[0] if axis is crossed else axis for axis in outer]
        loads = self._turned(crossed)
        with self.loops([*outer, tiles[1]], is_large) as at:
            starts = [T.Bind(at[tile.var] * size) for tile in tiles]

            def whole() -> None:
                at_start = {**at, **{a.var: start for a, start in zip(both, starts, strict=True)}}
                if size in LANES:
                    self._square(loads, at_start, both)
                    return
                rows = {load: self._transposed(load, at_start, both) for load in loads}
                for i in range(size):
                    with T.serial(0, size) as j:
                        place = {**at, crossed.var: starts[0] + i, inner.var: starts[1] + j}
                        self.element(place, loaded={load: rows[load][i][j] for load in loads})

            def part() -> None:
                extents = [
                    tirx.min(tirx.IntImm("int64", size), axis.extent - start)
                    for axis, start in zip(both, starts, strict=True)
                ]
                with T.serial(0, extents[0]) as i, T.serial(0, extents[1]) as j:
                    self.element({**at, crossed.var: starts[0] + i, inner.var: starts[1] + j})

            if not loads:
                part()
            elif all(axis.size is not None and axis.size % size == 0 for axis in both):
                whole()
            else:
                fits = [
                    start + size <= axis.extent for axis, start in zip(both, starts, strict=True)
                ]
                either(tirx.all(*fits), whole, part)

    def _turned(self, crossed: Axis) -> list:
        """Return the loads to transpose in registers; an empty list if one of them cannot be
        transposed."""
        inner = self.axes[-1]
        accesses = {
            load: access
            for load, access in self.accesses.loads.items()
            if access.stride(inner) not in (0, 1)
        }
        can_be = all(
            access.stride(crossed) == 1
            and inner.var not in access.opaque
            and str(access.buffer.dtype) == "float32"
            for access in accesses.values()
        )
        return list(accesses) if can_be and len(accesses) <= _TURNED else []

    def _square(self, loads: Sequence, at: dict, axes: tuple[Axis, Axis]) -> None:
        """Emit the elements of a square, with the operands transposed by the function of the
        program: see :mod:`relax_grad.cpu.squares`."""
        lanes, (crossed, inner) = self.cpu.lanes, axes
        vectors, squares = Vectors(lanes), {}

        def place_of(indices: Sequence, axis: Axis) -> tuple[tirx.PrimExpr, tirx.PrimExpr]:
            """Return the place of the first element, and the distance of the next one."""
            (index,) = indices
            first = substitute(index, at)
            return first, substitute(index, {**at, axis.var: at[axis.var] + 1}) - first

        for load in loads:
            source = loaded_buffer(load), *place_of(load.indices, inner)
            if self._copies(load, inner):
                (nest,) = self.group.nests
                target = nest.buffer, *place_of(nest.indices, crossed)
                turn(lanes, source, (lanes - 1, lanes), lanes, target)
                return
            squares[load] = T.alloc_buffer([lanes * lanes], "float32", layout=None)
            turn(lanes, source, (lanes - 1, lanes), lanes, (squares[load], const(0), lanes))
        with T.serial(0, lanes) as i:
            rows = {}
            for load, square in squares.items():
                # LLVM assumes that other stores may change the square, whose address is known.
                rows[load] = T.alloc_buffer([lanes], "float32", layout=None)
                vectors.store(rows[load], const(0), vectors.load(square, i * lanes))
            with T.serial(0, lanes) as j:
                place = {**at, crossed.var: at[crossed.var] + i, inner.var: at[inner.var] + j}
                self.element(place, loaded={load: row[j] for load, row in rows.items()})

    def _copies(self, load: tirx.PrimExpr, inner: Axis) -> bool:
        """Tell whether a load is all that is stored, next to each other along the last axis."""
        stores, nests = self.accesses.stores, self.group.nests
        return len(nests) == 1 and load.same_as(nests[0].value) and stores[0].stride(inner) == 1

    def _transposed(
        self, load: tirx.PrimExpr, at: dict, axes: tuple[Axis, Axis]
    ) -> list[tirx.Buffer]:
        """Emit the transposition of a square; return its rows along the last axis."""
        vectors = Vectors(self.cpu.lanes)
        buffer = loaded_buffer(load)
        (index,) = load.indices
        rows = []
        for j in range(vectors.lanes):
            place = {**at, axes[1].var: at[axes[1].var] + j}
            rows.append(T.Bind(vectors.load(buffer, substitute(index, place))))
        result = []
        for column in vectors.transpose(rows):
            row = T.alloc_buffer([vectors.lanes], "float32", layout=None)
            vectors.store(row, tirx.IntImm("int32", 0), column)
            result.append(row)
        return result


def _shuffled(vectors: Sequence, order: Sequence[int]) -> Shuffle:
    """Return the elements of vectors in an order."""
    return Shuffle(vectors, [tirx.IntImm("int32", i) for i in order])


def _turn(factor: int, rest: int, is_weak: bool) -> int:
    """Return the smallest integer ``x`` at which the truth of ``factor * x + rest < 0`` differs
    from that at ``x - 1``.

    With ``is_weak``, the inequality is ``<= 0``.
    """
    if factor < 0:  # the inequality starts to hold where its negation stops holding
        factor, rest, is_weak = -factor, -rest, not is_weak
    return -((rest - is_weak) // factor)


def _divided(axis: Axis, size: int) -> Axis:
    return Axis(tirx.Var("tile", "int64"), (axis.extent + (size - 1)) // size)
