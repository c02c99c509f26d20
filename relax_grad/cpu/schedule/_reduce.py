"""Loops for reductions: accumulators in registers, vectors along contiguous operands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product as combinations
from math import prod

import tvm.tirx.script.builder as T
from tvm import tirx

from ...ir.expressions import substitute, variables
from ..target import CPU
from . import _elements
from ._dependence import divides
from ._elements import Elements
from ._emitter import Emitter, at_place, is_vectorisable
from ._functions import calls_in, is_arithmetic
from ._fuse import Group, weigh
from ._halves import rounds
from ._nest import Axis, analyzer, simplify, size_of

#: The number of results that are enough tasks for the cores. With fewer results, reductions are
#: split into pieces.
_TASKS = 16

#: Elements of a reduction in one piece, if the results are too few.
_PIECE = 16384

#: The maximum number of pieces of a reduction.
_PIECES = 32

#: The number of vectors of accumulators: along a reduced axis, and along an axis of the results.
_SUMS, _KEPT = 4, 8

#: The maximum number of terms of an unrolled reduction, and of expression nodes in all of them.
_WRITTEN_OUT, _NODES = 32, 800

#: The identity element of each combining operation.
_IDENTITIES = {tirx.Add: 0, tirx.Mul: 1, tirx.And: 1, tirx.Or: 0}


class Reduction(Emitter):
    """A generator of loops whose elements are reductions (sums, products, extremes) over additional
    axes."""

    def __init__(self, group: Group, cpu: CPU):
        super().__init__(group, cpu)
        self.reduced: Sequence[Axis] = self.first.reduced
        self.dtype = str(self.first.buffer.dtype)
        self.width = self.lanes(self.dtype)
        self.is_plain = is_vectorisable(self.first.value) and self.dtype != "bool"
        # TVM vectorises plain arithmetic; LLVM vectorises the arithmetic of functions.
        is_computed = any(is_arithmetic(c) or rounds(c) for c in calls_in(self.first.value))
        self.vectorized = T.serial if is_computed else T.vectorized

    def emit(self) -> None:
        if any(axis.size == 0 for axis in self.axes):
            return
        work = size_of((*self.axes, *self.reduced))
        if work is not None and work < 64:
            self._serial(False)
            return
        along = self._along()
        if along not in self.reduced and self._is_short():
            short = self._written_out()
            if simplify(short.nests[0].value, analyzer(self.axes)) is not None:
                Elements(short, self.cpu).emit()
                return
        divided = self._divided(along, work)
        if divided is not None:
            for group in divided:
                Reduction(group, self.cpu).emit()
            return
        is_large = work is None or work >= _elements.SMALL
        if along is None and (not self.axes or not self._may_be_kept(self._innermost())):
            self._serial(is_large)
        elif along is None or along in self.axes:
            self._kept(along or self._innermost(), is_large)
        else:
            self._summed(along, is_large)

    def combine(self, a: tirx.PrimExpr, b: tirx.PrimExpr) -> tirx.PrimExpr:
        combine = self.first.combine
        assert combine is not None  # the first nest is a reduction
        return combine(a, b)

    def term(self, at: dict) -> tirx.PrimExpr:
        return self.arithmetic(at_place(self.first.value, at, {}))

    def start(self) -> tirx.PrimExpr:
        return self.arithmetic(self.first.init)

    def _is_short(self) -> bool:
        terms = size_of(self.reduced)
        if terms is None or not self.axes:
            return False
        return 0 < terms <= _WRITTEN_OUT and terms * weigh(self.first.value)[0] <= _NODES

    def _written_out(self) -> Group:
        """Return the group with the reduction unrolled into one expression."""
        total = self.first.init
        for values in combinations(*(range(int(axis.extent)) for axis in self.reduced)):
            at = {
                axis.var: tirx.IntImm(str(axis.var.ty.dtype), value)
                for axis, value in zip(self.reduced, values, strict=True)
            }
            total = self.combine(total, at_place(self.first.value, at, {}))
        first = replace(self.first, value=total, reduced=(), combine=None, init=None)
        return Group([first, *self.group.nests[1:]], self.group.stored)

    def _is_ragged(self, axis: Axis) -> bool:
        """Tell whether the number of terms varies along an axis of the results."""
        return any(axis.var in variables(inner.extent) for inner in self.reduced)

    def _may_be_kept(self, axis: Axis) -> bool:
        """Tell whether neighbouring results along an axis may be computed side by side.

        LLVM vectorises that loop, and compiles ``x[i % 4]`` like ``x[i]`` there: on AVX-512 it
        reads wrong elements, some out of bounds, for divisors that are powers of 2 below the number
        of lanes.
        """
        indices = (index for load in self.first.loads for index in load.indices)
        return not self._is_ragged(axis) and not any(divides(index, axis.var) for index in indices)

    def _innermost(self) -> Axis:
        return self.axes[-1]

    def _along(self) -> Axis | None:
        """Return the axis for vectors, or None: all operands are contiguous along it, or
        constant."""
        if not self.is_plain:
            return None
        best, most = None, 0
        loads = list(self.accesses.loads.items())
        own = {load: access for load, access in loads if load in set(self.first.loads)}
        for axis in (*self.axes[-1:], *self.reduced[::-1]):
            strides = [access.stride(axis) for access in own.values()]
            fits = axis.var not in self.accesses.tested and set(strides) <= {0, 1}
            fits = fits and not self._is_ragged(axis)
            is_wide = axis.size is None or axis.size >= self.width
            if axis not in self.axes and not self._has_identity():
                continue
            if fits and is_wide and strides.count(1) > most:
                best, most = axis, strides.count(1)
        return best

    def _has_identity(self) -> bool:
        """Tell whether the initial value is the identity, so that partial reductions may each start
        with it."""
        init, combine = self.first.init, self.first.combine
        if combine in _IDENTITIES:
            return _is_number(init, _IDENTITIES[combine])
        limit = tirx.min_value if combine is tirx.Max else tirx.max_value
        infinite = float("-inf") if combine is tirx.Max else float("inf")
        value = getattr(init, "value", None)
        bound = getattr(limit(self.dtype), "value", None)
        return value is not None and value in (bound, infinite)

    def _divided(self, along: Axis | None, work: int | None) -> list[Group] | None:
        """Return two groups, the partial reductions and their combination, or None if there are
        enough tasks.

        The partition depends on the shape alone, not on the number of threads, so that the result
        is reproducible.
        """
        if not self._has_identity() or not self.reduced or (work is not None and work < 4 * _PIECE):
            return None
        tasks = 1
        for axis in self.axes:
            size = axis.size or _TASKS
            tasks *= -(-size // (self.width * _KEPT)) if axis is along else size
        if tasks >= _TASKS or None in [axis.size for axis in self.axes]:
            return None
        longest = max(self.reduced, key=lambda axis: axis.size or 2**40)
        axis = next((a for a in self.reduced if (a.size or _PIECES) >= _PIECES), longest)
        line = _elements.LINE if axis is along else 1
        if axis.size is None:
            pieces = _PIECES
            piece = (axis.extent + (pieces * line - 1)) // (pieces * line) * line
        else:
            most = _PIECES if work is None else max(2, work // _PIECE)
            pieces = min(_PIECES, most, axis.size)
            pieces = 1 << (pieces.bit_length() - 1)  # a power of 2, which most core counts divide
            piece = tirx.IntImm("int64", -(-axis.size // (pieces * line)) * line)
            pieces = -(-axis.size // int(piece))
        if axis.size is not None and pieces < 2:
            return None
        return self._parts(axis, pieces, piece)

    def _parts(self, axis: Axis, pieces: int, piece: tirx.IntImm) -> list[Group]:
        first = self.first
        part = Axis(tirx.Var("part", "int64"), tirx.IntImm("int64", pieces))
        is_exact = axis.size is not None and axis.size % int(piece) == 0
        start = part.var * piece
        left = tirx.max(tirx.IntImm("int64", 0), axis.extent - start)
        inner = Axis(tirx.Var("within", "int64"), piece if is_exact else tirx.min(piece, left))
        size = prod(int(a.extent) for a in self.axes)
        partial = T.alloc_buffer([pieces * size], self.dtype, layout=None)
        place = tirx.IntImm("int64", 0)
        for result_axis in self.axes:
            place = place * result_axis.extent + result_axis.var
        parts = replace(
            first,
            axes=[part, *self.axes],
            buffer=partial,
            indices=[part.var * size + place],
            value=substitute(first.value, {axis.var: start + inner.var}),
            reduced=[inner if term_axis is axis else term_axis for term_axis in self.reduced],
        )
        total = replace(first, value=partial[part.var * size + place], reduced=[part])
        return [
            Group([parts], {partial}),
            Group([total, *self.group.nests[1:]], self.group.stored),
        ]

    def _serial(self, is_large: bool) -> None:
        """Emit one result after the other, in the order of the loops."""
        with self.loops(self.axes, is_large and bool(self.axes)) as at:
            total = self._scratch(1)
            T.buffer_store(total, self.start(), [0])
            with self.loops(self.reduced, at=at) as place:
                term = self.term(place)
                T.buffer_store(total, self.combine(total[0], term), [0])
            self.element(at, total[0])

    def _scratch(self, size: int) -> tirx.Buffer:
        return T.alloc_buffer([size], self.dtype, layout=None)

    def _kept(self, along: Axis, is_large: bool) -> None:
        """Emit the reductions of neighbouring results, side by side in registers."""
        widest, size = self.width * _KEPT, along.size
        fits = self.is_plain and all(
            access.stride(along) in (0, 1) for access in self.accesses.loads.values()
        )
        width = widest if size is None else min(widest, size)
        others = [axis for axis in self.axes if axis is not along]
        tiles = Axis(tirx.Var("tile", "int64"), along.extent // width)
        with self.loops([*others, tiles], is_large) as at:
            start = T.Bind(at.pop(tiles.var) * width)
            self._row(along, at, start, width, width, is_vector=fits and width % self.width == 0)
        left = along.extent % width
        if size is None or size % width:
            with self.loops(others, is_large and bool(others)) as at:
                self._row(along, at, T.Bind(along.extent - left), left, width, is_vector=False)

    def _row(
        self,
        along: Axis,
        at: dict,
        start: tirx.PrimExpr,
        number: int | tirx.PrimExpr,
        width: int,
        is_vector: bool,
    ) -> None:
        """Emit ``number`` neighbouring reductions, at most ``width``."""
        total = self._scratch(width)
        loop = self.vectorized if is_vector else T.serial
        number = tirx.IntImm("int64", number) if isinstance(number, int) else number
        with T.serial(0, number) as i:
            T.buffer_store(total, self.start(), [i])
        with self.loops(self.reduced, at=at) as place, loop(0, number) as i:
            term = self.term({**place, along.var: start + i})
            T.buffer_store(total, self.combine(total[i], term), [i])
        with T.serial(0, number) as i:
            self.element({**at, along.var: start + i}, total[i])

    def _summed(self, along: Axis, is_large: bool) -> None:
        """Emit reductions with vectors along a reduced axis: several vectors of accumulators,
        combined at the end."""
        sums = _SUMS if along.size is None else max(1, min(_SUMS, along.size // self.width))
        sums = 1 << (sums.bit_length() - 1)
        width = sums * self.width
        others = [axis for axis in self.reduced if axis is not along]
        with self.loops(self.axes, is_large and bool(self.axes)) as at:
            total, rest = self._scratch(width), self._scratch(1)
            with T.vectorized(0, width) as i:
                T.buffer_store(total, self.start(), [i])
            T.buffer_store(rest, self.start(), [0])

            def add(to: tirx.Buffer, i: tirx.PrimExpr, at: dict) -> None:
                T.buffer_store(to, self.combine(to[i], self.term(at)), [i])

            extent = substitute(along.extent, at)
            done = extent // width * width
            with self.loops(others, at=at) as place:
                with T.serial(0, extent // width) as k, self.vectorized(0, width) as i:
                    add(total, i, {**place, along.var: k * width + i})
                with T.serial(0, extent - done) as i:
                    add(rest, 0, {**place, along.var: done + i})
            while width > 1:
                width //= 2
                with (T.vectorized if width > 1 else T.serial)(0, width) as i:
                    T.buffer_store(total, self.combine(total[i], total[width + i]), [i])
            self.element(at, self.combine(total[0], rest[0]))


def _is_number(expr: tirx.PrimExpr, value: int) -> bool:
    return isinstance(expr, (tirx.IntImm, tirx.FloatImm)) and expr.value == value
