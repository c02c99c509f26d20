"""Loops for a group of nests: parallel outside, vectors inside, sums in registers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from itertools import product as combinations
from math import prod

import tvm.tirx.script.builder as T
import tvm_ffi
from tvm import tirx
from tvm.ir import Call, Op, Range

from .._compat import Analyzer, BufferLoad, detect_linear_equation, loaded_buffer
from ..kernel._builder import Vectors, either
from ..target import CPU
from ._access import Accesses
from ._functions import as_arithmetic, is_arithmetic
from ._fuse import Group, weigh
from ._nest import Axis, Nest, analyzer, product, simplify, substitute, variable_rule, variables

#: Operations that are done before a second thread has woken up.
_SMALL = 8192

#: Elements of a reduction that one task goes through, where the results are too few to divide.
_PIECE = 16384

#: Pieces of a reduction at most.
_PIECES = 32

#: Results that are enough to divide among any number of cores. A sum of fewer is taken apart.
_TASKS = 16

#: Elements that a cache line holds, or several: where pieces of a row begin.
_LINE = 64

#: Vectors that a sum is added up in.
_SUMS, _KEPT = 4, 8

#: Transposed operands that squares are made of.
_TURNED = 3

#: Bounds that the innermost loop is divided at, at most.
_BOUNDS = 6

#: Terms of a reduction that are written out one by one, and nodes of all of them.
_WRITTEN_OUT, _NODES = 32, 800

#: Functions that LLVM has for vectors.
_VECTOR_CALLS = {f"tirx.{name}" for name in ("exp", "log", "sqrt", "fabs", "floor", "ceil")}

_IDENTITIES = {tirx.Add: 0, tirx.Mul: 1, tirx.And: 1, tirx.Or: 0}


def emit(group: Group, cpu: CPU) -> None:
    """Emit the loops of a group over rows; see :func:`._fuse.flat`."""
    if group.nests[0].combine:
        _Reduction(group, cpu).emit()
    else:
        _Elements(group, cpu).emit()


class _Emitter:
    def __init__(self, group: Group, cpu: CPU):
        self.group, self.cpu = group, cpu
        self.first: Nest = group.nests[0]
        self.accesses = Accesses(group.nests)
        self.axes: Sequence[Axis] = self.first.axes
        self.read = [{loaded_buffer(load) for load in nest.loads} for nest in group.nests]

    def lanes(self, dtype) -> int:
        """Return how many elements of a dtype a vector register holds."""
        size = max(2, tvm_ffi.dtype(str(dtype)).bits // 8)
        return max(2, self.cpu.lanes * 4 // size)

    def element(
        self, at: dict, result=None, loaded: dict | None = None, known: Analyzer | None = None
    ) -> None:
        """Emit the computation of one element.

        Of a reduction, the result is given; ``loaded`` holds values for loads, and ``known`` simplifies.
        """
        values = dict(loaded or {})
        for i, nest in enumerate(self.group.nests):
            is_sum = result is not None and i == 0
            value = result if is_sum else _at(nest.value, at, values)
            if known is not None:
                value = known.simplify(value)
            value = value if is_sum else as_arithmetic(value)
            if any(nest.buffer in later for later in self.read[i + 1 :]):
                values[nest.buffer] = value = T.Bind(value)
            if nest.buffer in self.group.stored:
                T.buffer_store(nest.buffer, value, [substitute(i, at) for i in nest.indices])

    @contextlib.contextmanager
    def loops(
        self, axes: Sequence[Axis], parallel: bool = False, at: dict | None = None
    ) -> Iterator[dict]:
        """Open loops and yield where the axes are; with ``parallel``, the outer ones as one parallel loop.

        ``at`` says where the axes of the loops around are.
        """
        together = self._outer(axes) if parallel else []
        at = dict(at or {})
        with contextlib.ExitStack() as stack:
            if together:
                rest = stack.enter_context(T.parallel(0, product([a.extent for a in together])))
                for axis in together[:0:-1]:
                    at[axis.var] = T.Bind(rest % axis.extent)
                    rest = T.Bind(rest // axis.extent)
                at[together[0].var] = rest
            for axis in axes[len(together) :]:
                at[axis.var] = stack.enter_context(T.serial(0, substitute(axis.extent, at)))
            yield at

    def _outer(self, axes: Sequence[Axis]) -> list[Axis]:
        """Return the first axes, as many as give each core several tasks.

        Only constants are divided by: an extent may be 0.
        """
        count, outer = 1, []
        for axis in axes:
            if outer and (axis.size is None or count >= 8 * self.cpu.cores):
                break
            outer.append(axis)
            count *= axis.size or 1
        return outer


class _Elements(_Emitter):
    """Elements that do not depend on each other."""

    def emit(self) -> None:
        sizes = [axis.size for axis in self.axes]
        work = None if None in sizes else prod(sizes) * self._cost()
        is_large = work is None or work >= _SMALL
        if not self.axes:
            self.element({})
            return
        crossed = self._crossed()
        if crossed is not None:
            self._tiles(crossed, is_large)
            return
        *outer, inner = self.axes
        rows = 1 if not outer else None if None in sizes[:-1] else prod(sizes[:-1])
        is_even = (
            rows is None or rows >= 8 * self.cpu.cores or (rows > 1 and rows % self.cpu.cores == 0)
        )
        if is_large and not is_even:
            self._pieces(outer, inner, rows)
            return
        with self.loops(outer, is_large) as at:
            self._row(inner, at)

    def _row(self, inner: Axis, at: dict) -> None:
        """Emit the innermost loop: one loop for each range in which the same conditions hold."""
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
        """Return where the ranges of an axis begin and end that conditions tell apart."""
        ends = [tirx.IntImm("int64", 0), inner.extent]
        if inner.size is None or inner.var not in self.accesses.tested:
            return ends
        found = set()

        def visit(node) -> None:
            difference = node.a - node.b
            if {inner.var} != variables(difference):
                return
            parts = detect_linear_equation(difference, [inner.var])
            if len(parts) == 2 and all(isinstance(part, tirx.IntImm) for part in parts):
                factor, rest = map(int, parts)
                if factor:
                    # Between neighbours the sign changes, or an inequality begins to hold.
                    found.update(range(-rest // factor, -rest // factor + 2))

        for nest in self.group.nests:
            tvm_ffi.structural_walk(nest.value, ((tirx.LT, tirx.LE, tirx.GT, tirx.GE), visit))
        inside = sorted(bound for bound in found if 0 < bound < inner.size)
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
        return 1 + 4 * sum(len(_calls(nest.value)) for nest in self.group.nests)

    def _pieces(self, outer: list[Axis], inner: Axis, rows: int) -> None:
        """Divide rows, which are few, among the cores."""
        pieces, extent = self.cpu.cores, inner.extent
        piece = (extent + (pieces * _LINE - 1)) // (pieces * _LINE) * _LINE
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
        """Return the axis along which something is read that is written along the last axis."""
        *outer, inner = self.axes
        if self.accesses.is_opaque(inner) or (inner.size or _LINE) < 4:
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
        """Go through squares, in which what is read and what is written stays in the cache."""
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
        """Return the loads that a square is transposed of in registers; none where some cannot be."""
        inner = self.axes[-1]
        found = {
            load: access
            for load, access in self.accesses.loads.items()
            if access.stride(inner) not in (0, 1)
        }
        can_be = all(
            access.stride(crossed) == 1
            and inner.var not in access.opaque
            and str(access.buffer.dtype) == "float32"
            for access in found.values()
        )
        return list(found) if can_be and len(found) <= _TURNED else []

    def _transposed(self, load, at: dict, axes: tuple[Axis, Axis]) -> list[tirx.Buffer]:
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


class _Reduction(_Emitter):
    """Elements that are sums, products or extremes over further axes."""

    def __init__(self, group: Group, cpu: CPU):
        super().__init__(group, cpu)
        self.reduced: Sequence[Axis] = self.first.reduced
        self.dtype = str(self.first.buffer.dtype)
        self.width = self.lanes(self.dtype)
        self.is_plain = _is_vectorisable(self.first.value) and self.dtype != "bool"
        # TVM makes vectors of arithmetic, LLVM of what functions are made of.
        self.vectorized = (
            T.serial if any(map(is_arithmetic, _calls(self.first.value))) else T.vectorized
        )

    def emit(self) -> None:
        sizes = [axis.size for axis in (*self.axes, *self.reduced)]
        work = None if None in sizes else prod(sizes)
        if work is not None and work < 64:
            self._serial(False)
            return
        along = self._along()
        if along not in self.reduced and self._is_short():
            short = self._written_out()
            if simplify(short.nests[0].value, analyzer(self.axes)) is not None:
                _Elements(short, self.cpu).emit()
                return
        divided = self._divided(along, work)
        if divided is not None:
            for group in divided:
                _Reduction(group, self.cpu).emit()
            return
        is_large = work is None or work >= _SMALL
        if along is None and not self.axes:
            self._serial(is_large)
        elif along is None or along in self.axes:
            self._kept(along or self._innermost(), is_large)
        else:
            self._summed(along, is_large)

    def combine(self, a, b):
        return self.first.combine(a, b)

    def term(self, at: dict):
        return as_arithmetic(_at(self.first.value, at, {}))

    def _is_short(self) -> bool:
        sizes = [axis.size for axis in self.reduced]
        terms = 0 if None in sizes or not self.axes else prod(sizes)
        return 0 < terms <= _WRITTEN_OUT and terms * weigh(self.first.value)[0] <= _NODES

    def _written_out(self) -> Group:
        """Return the group with all terms of the reduction in one expression."""
        total = self.first.init
        for values in combinations(*(range(axis.size) for axis in self.reduced)):
            at = {
                axis.var: tirx.IntImm(str(axis.var.ty.dtype), value)
                for axis, value in zip(self.reduced, values, strict=True)
            }
            total = self.combine(total, _at(self.first.value, at, {}))
        first = replace(self.first, value=total, reduced=(), combine=None, init=None)
        return Group([first, *self.group.nests[1:]], self.group.stored)

    def _innermost(self) -> Axis:
        return self.axes[-1]

    def _along(self) -> Axis | None:
        """Return the axis that vectors lie along: one that everything is read in order along, or not at all."""
        if not self.is_plain:
            return None
        best, most = None, 0
        loads = list(self.accesses.loads.items())
        own = {load: access for load, access in loads if load in set(self.first.loads)}
        for axis in (*self.axes[-1:], *self.reduced[::-1]):
            strides = [access.stride(axis) for access in own.values()]
            fits = axis.var not in self.accesses.tested and set(strides) <= {0, 1}
            is_wide = axis.size is None or axis.size >= self.width
            if axis not in self.axes and not self._has_identity():
                continue
            if fits and is_wide and strides.count(1) > most:
                best, most = axis, strides.count(1)
        return best

    def _has_identity(self) -> bool:
        """Tell whether several parts of a reduction may each begin with its first value."""
        init, combine = self.first.init, self.first.combine
        if combine in _IDENTITIES:
            return _is_number(init, _IDENTITIES[combine])
        limit = tirx.min_value if combine is tirx.Max else tirx.max_value
        infinite = float("-inf") if combine is tirx.Max else float("inf")
        value = getattr(init, "value", None)
        bound = getattr(limit(self.dtype), "value", None)
        return value is not None and value in (bound, infinite)

    def _divided(self, along: Axis | None, work: int | None) -> list[Group] | None:
        """Return two groups: parts of the reduction, and their sum; None where there are tasks enough.

        The parts are those of the shape, not of the number of threads, so that the sum is always the same.
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
        line = _LINE if axis is along else 1
        if axis.size is None:
            pieces = _PIECES
            piece = (axis.extent + (pieces * line - 1)) // (pieces * line) * line
        else:
            pieces = min(_PIECES, max(2, work // _PIECE), axis.size)
            pieces = 1 << (pieces.bit_length() - 1)  # which most numbers of cores divide
            piece = tirx.IntImm("int64", -(-axis.size // (pieces * line)) * line)
            pieces = -(-axis.size // int(piece))
        if axis.size is not None and pieces < 2:
            return None
        return self._parts(axis, pieces, piece)

    def _parts(self, axis: Axis, pieces: int, piece) -> list[Group]:
        first = self.first
        part = Axis(tirx.Var("part", "int64"), tirx.IntImm("int64", pieces))
        is_exact = axis.size is not None and axis.size % int(piece) == 0
        start = part.var * piece
        left = tirx.max(tirx.IntImm("int64", 0), axis.extent - start)
        inner = Axis(tirx.Var("within", "int64"), piece if is_exact else tirx.min(piece, left))
        size = prod(a.size for a in self.axes)
        partial = T.alloc_buffer([pieces * size], self.dtype, layout=None)
        place = tirx.IntImm("int64", 0)
        for each in self.axes:
            place = place * each.extent + each.var
        parts = replace(
            first,
            axes=[part, *self.axes],
            buffer=partial,
            indices=[part.var * size + place],
            value=substitute(first.value, {axis.var: start + inner.var}),
            reduced=[inner if each is axis else each for each in self.reduced],
        )
        total = replace(first, value=partial[part.var * size + place], reduced=[part])
        return [
            Group([parts], {partial}),
            Group([total, *self.group.nests[1:]], self.group.stored),
        ]

    def _serial(self, is_large: bool) -> None:
        """One result after the other, in the order of the loops."""
        with self.loops(self.axes, is_large and bool(self.axes)) as at:
            total = self._scratch(1)
            T.buffer_store(total, self.first.init, [0])
            with self.loops(self.reduced, at=at) as place:
                term = self.term(place)
                T.buffer_store(total, self.combine(total[0], term), [0])
            self.element(at, total[0])

    def _scratch(self, size: int) -> tirx.Buffer:
        return T.alloc_buffer([size], self.dtype, layout=None)

    def _kept(self, along: Axis, is_large: bool) -> None:
        """Sums of neighbours, side by side in registers."""
        widest, size = self.width * _KEPT, along.size
        fits = self.is_plain and all(
            access.stride(along) in (0, 1) for access in self.accesses.loads.values()
        )
        width = widest if size is None else min(widest, size)
        others = [axis for axis in self.axes if axis is not along]
        tiles = Axis(tirx.Var("tile", "int64"), along.extent // width)
        with self.loops([*others, tiles], is_large) as at:
            start = T.Bind(at.pop(tiles.var) * width)
            self._row(along, at, start, width, width, fits and width % self.width == 0)
        left = along.extent % width
        if size is None or size % width:
            with self.loops(others, is_large and bool(others)) as at:
                self._row(along, at, T.Bind(along.extent - left), left, width, False)

    def _row(self, along: Axis, at: dict, start, number, width: int, is_vector: bool) -> None:
        """Emit a row of sums, ``number`` of at most ``width``."""
        total = self._scratch(width)
        loop = self.vectorized if is_vector else T.serial
        number = tirx.IntImm("int64", number) if isinstance(number, int) else number
        with T.serial(0, number) as i:
            T.buffer_store(total, self.first.init, [i])
        with self.loops(self.reduced, at=at) as place, loop(0, number) as i:
            term = self.term({**place, along.var: start + i})
            T.buffer_store(total, self.combine(total[i], term), [i])
        with T.serial(0, number) as i:
            self.element({**at, along.var: start + i}, total[i])

    def _summed(self, along: Axis, is_large: bool) -> None:
        """Sums along what vectors lie along: several vectors of sums, which are added at the end."""
        sums = _SUMS if along.size is None else max(1, min(_SUMS, along.size // self.width))
        sums = 1 << (sums.bit_length() - 1)
        width = sums * self.width
        others = [axis for axis in self.reduced if axis is not along]
        with self.loops(self.axes, is_large and bool(self.axes)) as at:
            total, rest = self._scratch(width), self._scratch(1)
            with T.vectorized(0, width) as i:
                T.buffer_store(total, self.first.init, [i])
            T.buffer_store(rest, self.first.init, [0])

            def add(to, i, at) -> None:
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


def _at(expr, at: dict, known: dict):
    """Return an expression for where the axes are, with values in the place of loads."""

    def load(old):
        return known.get(old, known.get(loaded_buffer(old), old))

    rules = [(BufferLoad, load), (tirx.Var, variable_rule(at))]
    return tvm_ffi.structural_map(expr, rules, order="pre")


def _divided(axis: Axis, size: int) -> Axis:
    return Axis(tirx.Var("tile", "int64"), (axis.extent + (size - 1)) // size)


def _is_number(expr, value: int) -> bool:
    return isinstance(expr, (tirx.IntImm, tirx.FloatImm)) and expr.value == value


def _is_vectorisable(expr) -> bool:
    """Tell whether TVM makes vectors of an expression: without conditions, and functions that have none."""
    return all(
        is_arithmetic(call) or (isinstance(call.op, Op) and call.op.name in _VECTOR_CALLS)
        for call in _calls(expr)
    )


def _calls(expr) -> list[Call]:
    calls = []
    tvm_ffi.structural_walk(expr, (Call, calls.append))
    return calls
