"""Vectors of the elements of buffers, and accumulators of vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import tvm.tirx.script.builder as T
from tvm import tirx
from tvm.tirx import Broadcast, IntImm, Ramp, Shuffle

from ....ir.compat import masked_load, masked_store
from ...squares import LANES
from .extents import Extent, as_expr, ceil_div, const
from .halves import Half, Tensor
from .statements import Emit, bind, opaque, scratch, serial, store, when
from .turned import turn

#: Buffers of at least this size become separate allocations; LLVM keeps smaller ones in registers.
_REGISTER_BYTES = 1024


class Vectors:
    """Operations on vectors of as many elements as a register of the target holds.

    Parameters
    ----------
    lanes : int
        Elements of a vector: a power of 2.
    dtype : str
        Their dtype.
    """

    def __init__(self, lanes: int, dtype: str = "float32"):
        self.lanes, self.dtype = lanes, dtype

    def load(
        self, buffer: tirx.Buffer, index: tirx.PrimExpr, number: Extent | None = None
    ) -> tirx.PrimExpr:
        """Load consecutive elements: all lanes, or the first ``number`` lanes with 0 in the
        others."""
        if self._is_whole(number):
            return buffer[self._ramp(index)]
        mask = self._mask(number)
        # For LLVM, the other lanes are undefined until a Select sets them to 0. The load is bound
        # first: within a Select, TVM assumes its condition and would load all lanes. The result
        # goes through a buffer, which LLVM keeps in a register: TVM's simplifier visits both cases
        # of a bound Select at every use of the variable.
        if isinstance(buffer, Half):
            loaded = bind(buffer.masked_load(self._ramp(index), mask))
        else:
            loaded = bind(masked_load(buffer, self._ramp(index), mask))
        row = scratch(self.lanes, self.dtype)
        T.buffer_store(row, tirx.Select(mask, loaded, self.splat(0)), [self._ramp(const(0))])
        return row[self._ramp(const(0))]

    def store(
        self,
        buffer: tirx.Buffer,
        index: tirx.PrimExpr,
        vector: tirx.PrimExpr,
        number: Extent | None = None,
        bias: tirx.PrimExpr | None = None,
    ) -> None:
        """Store consecutive elements: all lanes, or the first ``number`` lanes. The bias is the
        buffer's, if it is known."""
        if self._is_whole(number):
            if isinstance(buffer, Half):
                buffer.store(self._ramp(index), vector, bias)
            else:
                store(buffer, self._ramp(index), vector)
        elif isinstance(buffer, Half):
            buffer.masked_store(vector, self._ramp(index), self._mask(number), bias)
        else:
            masked_store(buffer, vector, self._ramp(index), self._mask(number))

    def splat(self, value: tirx.PrimExpr | float) -> tirx.PrimExpr:
        """Return a vector of one value."""
        if isinstance(value, (int, float)):
            value = tirx.const(float(value), self.dtype)
        return Broadcast(value, self.lanes)

    def only(
        self, vector: tirx.PrimExpr, number: Extent | None, other: float = 0.0
    ) -> tirx.PrimExpr:
        """Return a vector with ``other`` in the lanes from ``number`` on; unchanged if number is
        None."""
        if self._is_whole(number):
            return vector
        return tirx.Select(self._mask(number), vector, self.splat(other))

    def transpose(self, rows: Sequence) -> list:
        """Return the columns of a square of vectors, in log2(lanes) rounds of shuffles."""
        half = self.lanes // 2
        low = [lane for i in range(half) for lane in (i, self.lanes + i)]
        high = [lane + half for lane in low]
        rows = list(rows)
        for _ in range(self.lanes.bit_length() - 1):
            pairs = [(rows[i], rows[i + half]) for i in range(half)]
            rows = [opaque(_shuffle(pair, lanes)) for pair in pairs for lanes in (low, high)]
        return rows

    def copy_transposed(
        self,
        source: tuple[tirx.Buffer, tirx.PrimExpr, Extent],
        left: tirx.PrimExpr | None,
        extent: Extent,
        target: tirx.Buffer,
        place: Callable,
        scale: float | None = None,
        stored: tirx.PrimExpr | None = None,
        *,
        repeats: bool = False,
        strides: tuple[Extent, ...] = (),
    ) -> None:
        """Copy ``lanes`` rows transposed, a square at a time.

        Parameters
        ----------
        source : tuple
            A buffer, the offset of the first row in it, and the stride of the rows.
        left : tirx.PrimExpr or None
            The number of rows that exist; the others are copied as 0. None: all of them.
        extent : int or tirx.PrimExpr
            The length of the rows.
        target : tirx.Buffer
            The buffer of the copy.
        place : Callable
            ``place(k)`` returns the index in ``target`` of the k-th elements of all rows.
        scale : float, optional
            A factor of all elements.
        stored : tirx.PrimExpr, optional
            The number of rows of which elements are stored; by default all.
        repeats : bool
            Whether rows that do not exist repeat the last one, instead of being 0.
        strides : tuple
            The distance of the places of consecutive k, if it is the same for all; or this
            distance, the number of k in a run that has it, and the distance of runs. Then a
            function of the program makes the copy, if it can: see :mod:`.turned`.
        """
        buffer, start, step = source
        if strides and scale is None and self.has_function(buffer, target):
            apart, *runs = strides
            existing = const(self.lanes) if left is None else left
            last = tirx.max(existing - 1, const(0))
            turn(
                self.lanes,
                source,
                (last, self.lanes if repeats else existing),
                extent,
                (target, place(const(0)), apart),
                (runs[0], runs[1]) if runs else None,
                stored,
            )
            return
        offsets = [i * step for i in range(self.lanes)]
        if left is not None:
            # A processor takes long for a load without lanes, if its page does not exist.
            last = bind(tirx.max(left - 1, const(0)))
            offsets = [bind(tirx.min(const(i), last) * step) for i in range(self.lanes)]

        def square(k: tirx.PrimExpr, number: Extent | None) -> None:
            size = as_expr(self.lanes if number is None else number)

            def row(i: int) -> tirx.PrimExpr:
                exists = number
                if left is not None and not repeats:
                    exists = tirx.Select(left > i, size, const(0))
                value = self.load(buffer, start + offsets[i] + k, exists)
                return bind(value if scale is None else value * self.splat(scale))

            for i, column in enumerate(self.transpose([row(i) for i in range(self.lanes)])):
                if number is None or (isinstance(number, int) and i < number):
                    self.store(target, place(k + i), column, stored)
                elif not isinstance(number, int):
                    with when(number > i):
                        self.store(target, place(k + i), column, stored)

        self.each(int(extent) if isinstance(extent, IntImm) else extent, square)

    def turn_rows(
        self,
        source: tuple[tirx.Buffer, tirx.PrimExpr, Extent],
        extent: Extent,
        number: Extent,
        target: tuple[tirx.Buffer, tirx.PrimExpr, Extent],
    ) -> None:
        """Copy the columns of rows to rows, by a function of the program: see
        :meth:`has_function`.

        Parameters
        ----------
        source : tuple
            A buffer, the offset of the first row in it, and the stride of the rows. As many rows
            are read as squares have.
        extent : int or tirx.PrimExpr
            The number of rows.
        number : int or tirx.PrimExpr
            The number of columns. At most as many as lanes are copied.
        target : tuple
            The buffer of the copy, the offset of the first column in it, and the stride of the
            columns.
        """
        (buffer, start, step), (to, place, apart), lanes = source, target, self.lanes
        columns = tirx.min(as_expr(number), const(lanes))
        with serial(0, ceil_div(extent, lanes)) as i:
            first = bind(i * lanes)
            left = bind(tirx.min(const(lanes), extent - first))
            rows = (buffer, start + first * step, step)
            turn(lanes, rows, (lanes - 1, lanes), columns, (to, place + first, apart), stored=left)

    def deinterleave(self, parts: Sequence) -> list:
        """Return n vectors from n consecutive ones: the i-th holds every n-th element from element
        i on."""
        step = len(parts)
        if step == 1:
            return list(parts)
        ends = range(step * self.lanes, step * self.lanes + step)
        return [opaque(_shuffle(parts, range(i, end, step))) for i, end in enumerate(ends)]

    def every(self, vector: tirx.PrimExpr, step: int) -> tirx.PrimExpr:
        """Return a vector that begins with every ``step``-th element of another."""
        return _shuffle([vector], (min(i * step, self.lanes - 1) for i in range(self.lanes)))

    def interleave(self, parts: Sequence) -> list:
        """Return the inverse of :meth:`deinterleave`."""
        if len(parts) == 1:
            return list(parts)
        order = [i * self.lanes + lane for lane in range(self.lanes) for i in range(len(parts))]
        starts = range(0, len(order), self.lanes)
        return [opaque(_shuffle(parts, order[start : start + self.lanes])) for start in starts]

    def sum(self, vector: tirx.PrimExpr) -> tirx.PrimExpr:
        """Return the sum of the elements of a vector, added pairwise."""
        return self.fold(vector, lambda a, b: a + b)

    def fold(self, vector: tirx.PrimExpr, combine: Callable) -> tirx.PrimExpr:
        """Return the reduction of a vector, combined pairwise: first the elements half a vector
        apart."""
        size = self.lanes
        while size > 1:
            size //= 2
            halves = _shuffle([vector], range(size)), _shuffle([vector], range(size, 2 * size))
            vector = (opaque if size > 1 else bind)(combine(*halves))
        return vector

    def each(self, extent: Extent, emit: Emit, unroll: int = 1, *, has_rest: bool = True) -> None:
        """Emit ``emit(offset, number)`` for each vector of a row; number is None except in the
        last.

        A negative ``extent`` would write before the row.
        With ``unroll``, ``emit(offset, number, i)`` is repeated that many times in the body of the
        loop. Without ``has_rest``, a symbolic extent is a multiple of the elements of the body.
        """
        call = emit if unroll > 1 else (lambda offset, number, _: emit(offset, number))
        step = self.lanes * unroll
        full = extent // step
        if not _is_zero(full):
            with serial(0, full) as i:
                offset = bind(i * step)
                for j in range(unroll):
                    call(offset + j * self.lanes, None, j)
        if isinstance(extent, int):
            for j, offset in enumerate(range(full * step, extent, self.lanes)):
                left = extent - offset
                call(const(offset), left if left < self.lanes else None, j)
        elif has_rest:
            done = bind(full * step)
            with serial(0, ceil_div(extent - done, self.lanes)) as i:
                offset = bind(done + i * self.lanes)
                call(offset, tirx.min(const(self.lanes), extent - offset), 0)

    def has_function(self, *buffers: Tensor) -> bool:
        """Tell whether a function of the program transposes elements of buffers."""
        is_plain = not any(isinstance(buffer, Half) for buffer in buffers)
        return is_plain and self.dtype == "float32" and self.lanes in LANES

    def _is_whole(self, number: Extent | None) -> bool:
        return number is None or (isinstance(number, int) and number >= self.lanes)

    def _ramp(self, index: Extent) -> tirx.PrimExpr:
        return Ramp(index, const(1), self.lanes)

    def _mask(self, number: Extent) -> tirx.PrimExpr:
        lane = Ramp(const(0), const(1), self.lanes)
        return tirx.LT(lane, Broadcast(as_expr(number), self.lanes))


class Accumulators:
    """Vector accumulators, held in registers.

    Parameters
    ----------
    vectors : Vectors
        The kind of vectors.
    size : int
        The number of accumulators. More than the registers of the target would spill.
    """

    def __init__(self, vectors: Vectors, size: int):
        self._vectors = vectors
        self._each = (_REGISTER_BYTES - 1) // (4 * vectors.lanes)
        self._buffers = [
            scratch(min(self._each, size - start) * vectors.lanes, vectors.dtype)
            for start in range(0, size, self._each)
        ]

    def __getitem__(self, index: int) -> tirx.PrimExpr:
        return self._vectors.load(*self._place(index))

    def __setitem__(self, index: int, value: tirx.PrimExpr) -> None:
        buffer, at = self._place(index)
        self._vectors.store(buffer, at, value)

    def _place(self, index: int) -> tuple[tirx.Buffer, int]:
        return self._buffers[index // self._each], index % self._each * self._vectors.lanes


def interleaved(first: tirx.PrimExpr, second: tirx.PrimExpr, lanes: int) -> list:
    """Return two vectors with the elements of two others in turns."""
    parts = (range(lanes // 2), range(lanes // 2, lanes))
    orders = [[lane for i in part for lane in (i, lanes + i)] for part in parts]
    return [opaque(_shuffle((first, second), order)) for order in orders]


def _shuffle(vectors: Sequence, lanes: Iterable[int]) -> tirx.PrimExpr:
    return Shuffle(list(vectors), [const(lane) for lane in lanes])


def _is_zero(extent: Extent) -> bool:
    return isinstance(extent, int) and extent == 0
