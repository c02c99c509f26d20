"""The language of the generated kernels: functions over flat buffers, vectors and accumulators.

A kernel is a ``tirx.PrimFunc`` that Python code emits statement by statement. Python loops are
unrolled; :func:`serial` and :func:`parallel` emit loops. Expressions are TVM's; :func:`bind` binds
one to a variable, so that it is computed once. Indices are int32.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, reduce
from math import prod
from typing import TypeAlias

import tvm.tirx.script.builder as T
import tvm_ffi
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx import Broadcast, IntImm, Ramp, Shuffle

from ...ir.compat import masked_load, masked_store
from ...ir.dtypes import HALVES
from ...ir.module import IS_KERNEL, NO_ALIASES, SCHEDULED_ATTRS
from .halves import Half, stored_params

Extent: TypeAlias = "int | tirx.PrimExpr"
bind = T.Bind

#: The buffers allocated in each open block.
_SCOPES: ContextVar[list[list[tirx.Buffer]]] = ContextVar("scopes")

#: Whether parallel loops run in one thread.
_ONE_THREAD: ContextVar[bool] = ContextVar("one_thread", default=False)

#: The elements of all tensors up to which one thread runs a kernel: it takes no longer than waking
#: another one.
_FEW_ELEMENTS = 4096

#: The elements that one task rounds to half precision.
_ROUNDED = 4096

#: Buffers of at least this size become separate allocations; LLVM keeps smaller ones in registers.
_REGISTER_BYTES = 1024


#: The number of elements that an int32 index can address.
_MOST_ELEMENTS = 2**31 - 1


def prim_func(
    name: str,
    params: Sequence[tuple[str, Sequence[Extent], str]],
    body: Callable[..., None],
) -> tirx.PrimFunc:
    """Return a function whose body ``body`` emits.

    Parameters
    ----------
    name : str
        The name.
    params : Sequence[tuple[str, Sequence[int or tirx.PrimExpr], str]]
        The name, shape and dtype of each tensor, the results last.
    body : Callable
        Takes a flat buffer for each tensor, whose elements are in row-major order.
    """
    params, results = stored_params(params)
    function, flat = _emitted(name, params, body, frozenset())
    read = {
        i
        for i in range(len(params) - results, len(params))
        if isinstance(flat[i], Half) and flat[i].was_read
    }
    # A result that is read again, such as a sum in several parts, is rounded once, at the end.
    return _emitted(name, params, body, read)[0] if read else function


def _emitted(
    name: str, params: Sequence[tuple], body: Callable[..., None], in_parts: Collection[int]
) -> tuple[tirx.PrimFunc, list]:
    """Return a function and its flat buffers; the results ``in_parts`` are computed in a buffer of
    float32."""
    with IRBuilder() as builder, T.prim_func():
        T.func_name(name)
        # The tensors of a call do not alias, and kernels are not fused with other functions.
        T.func_attr({NO_ALIASES: True, IS_KERNEL: True, **SCHEDULED_ATTRS})
        tensors = [T.arg(name, _tensor(name, shape, dtype)) for name, shape, dtype in params]
        # TVM's detection of reshapes assumes that the body of a function with one argument is a
        # block.
        with block(name), scopes():
            sizes = [count(shape) for _, shape, _ in params]
            flat = [
                Half(tensor, size, dtype)
                if dtype in HALVES
                else T.decl_buffer([size], dtype, data=tensor.data, layout=None)
                for tensor, size, (_, _, dtype) in zip(tensors, sizes, params, strict=True)
            ]
            for shape in {str(shape): shape for _, shape, _ in params}.values():
                refuse_large(name, shape)
            few = all(isinstance(size, int) for size in sizes) and sum(sizes) <= _FEW_ELEMENTS
            with one_thread(few):
                wide = {i: scratch(sizes[i]) for i in in_parts}
                body(*(wide.get(i, buffer) for i, buffer in enumerate(flat)))
                for i, buffer in wide.items():
                    _round(buffer, flat[i], sizes[i])
    return builder.get(), flat


def _round(source: tirx.Buffer, target: Half, size: Extent) -> None:
    """Copy elements of float32 to a tensor in half precision."""
    with parallel(0, ceil_div(size, _ROUNDED)) as i:
        start = bind(i * _ROUNDED)
        with serial(0, bind(tirx.min(const(_ROUNDED), size - start))) as j:
            target.store(start + j, source[start + j])


def refuse_large(name: str, shape: Sequence[Extent]) -> None:
    """Emit an assertion that int32 indices can address all elements of a symbolic shape."""
    if all(isinstance(extent, int) for extent in shape):
        return
    size = tirx.const(1, "int64")
    for extent in shape:
        size = size * tirx.Cast("int64", as_expr(extent))
    message = f"{name}: a tensor has more than 2**31 - 1 elements, the limit of this function"
    with T.Assert(size <= tirx.const(_MOST_ELEMENTS, "int64"), message):
        pass


def _tensor(name: str, shape: Sequence[Extent], dtype: str) -> tirx.Buffer:
    # TVM assumes tensors aligned to 64 bytes; PyTorch's tensors may have any alignment.
    align = tvm_ffi.dtype(dtype).itemsize
    return T.buffer(list(shape), dtype, buffer_name=name, align=align, layout=None)


def floats(names: Iterable[str], shapes: Iterable[Sequence[Extent]]) -> list[tuple]:
    """Return float32 parameters for :func:`prim_func`."""
    return [(name, shape, "float32") for name, shape in zip(names, shapes, strict=True)]


@contextmanager
def block(name: str) -> Iterator[None]:
    """Emit a block with empty read and write regions."""
    with T.sblock(name):
        T.reads([])
        T.writes([])
        yield


@contextmanager
def scopes() -> Iterator[None]:
    """Emit the body of a function."""
    token = _SCOPES.set([])
    with _block():
        yield
    _SCOPES.reset(token)


@contextmanager
def _block():
    """Extend the lifetime of the buffers of a block to its end."""
    _SCOPES.get().append([])
    yield
    for buffer in _SCOPES.get().pop():
        T.evaluate(buffer.data)


@contextmanager
def serial(start: Extent, stop: Extent) -> Iterator[tirx.Var]:
    """Emit a loop."""
    with T.serial(start, stop) as index, _block():
        yield index


@contextmanager
def parallel(start: Extent, stop: Extent) -> Iterator[tirx.Var]:
    """Emit a loop whose iterations are divided among threads; parallel loops do not nest.

    Within :func:`one_thread`, it is a loop of one thread.
    """
    loop = T.serial if _ONE_THREAD.get() else T.parallel
    with loop(start, stop) as index, _block():
        yield index


@contextmanager
def one_thread(condition: bool = True) -> Iterator[None]:
    """Let parallel loops run in one thread, if the condition holds: waking the others costs more
    than small work."""
    token = _ONE_THREAD.set(condition or _ONE_THREAD.get())
    try:
        yield
    finally:
        _ONE_THREAD.reset(token)


def count(shape: Iterable[Extent]) -> Extent:
    """Return the number of elements of a shape."""
    return prod(shape)


def ceil_div(a: Extent, b: int) -> Extent:
    """Return a / b rounded up."""
    return (a + (b - 1)) // b


def quotient(a: Extent, b: Extent) -> Extent:
    """Return a / b rounded down, of numbers that are not negative.

    TVM tries to prove the signs of a symbolic floor division, which takes seconds.
    """
    if isinstance(a, int) and isinstance(b, int):
        return a // b
    return tirx.truncdiv(as_expr(a), as_expr(b))


@lru_cache(maxsize=4096)
def const(value: int) -> IntImm:
    return IntImm(
        "int32", value
    )  # cached: kernels hold tens of thousands of constants, most of them in shuffles


def scratch(size: Extent, dtype: str = "float32") -> tirx.Buffer:
    """Allocate a buffer that lives until the end of the block or the function."""
    own = T.alloc_buffer([size], dtype, layout=None)
    # TVM computes the region that each access to a buffer touches, to allocate no more than that.
    # For a tile of scalars and vectors, this takes longer than the rest of the compilation.
    # Accesses through a second pointer avoid it. They also hide the buffer's lifetime from TVM: see
    # _block, which states it.
    _SCOPES.get()[-1].append(own)
    return T.decl_buffer([size], dtype, data=bind(own.data), layout=None)


def computed(value: Extent) -> Extent:
    """Bind a number that TVM's simplifier does not look into: it visits the terms of a bound
    expression, and theirs, at every use."""
    if isinstance(value, (int, IntImm)):
        return value
    place = scratch(1, "int32")
    store(place, 0, value)
    return bind(place[0])


def store(buffer: tirx.Buffer, index: tirx.PrimExpr, value: tirx.PrimExpr) -> None:
    """Store one element."""
    if isinstance(buffer, Half):
        buffer.store(index, value)
    else:
        T.buffer_store(buffer, value, [index])


def copy(
    target: tirx.Buffer,
    at: tirx.PrimExpr,
    source: tirx.Buffer,
    start: tirx.PrimExpr,
    number: Extent,
) -> None:
    """Copy consecutive elements to another buffer."""
    if str(target.dtype) != str(source.dtype):  # one of them is in half precision
        with serial(0, number) as i:
            store(target, at + i, source[start + i])
        return
    pointers = _address(target, at), _address(source, start)
    _call("llvm.memcpy", *pointers, _bytes(target, number), tirx.const(False, "bool"))


def clear(target: tirx.Buffer, at: tirx.PrimExpr, number: Extent) -> None:
    """Store 0 to consecutive elements."""
    zero, is_volatile = tirx.const(0, "int8"), tirx.const(False, "bool")
    _call("llvm.memset", _address(target, at), zero, _bytes(target, number), is_volatile)


def _address(buffer: tirx.Buffer, index):
    return tirx.address_of((buffer.raw if isinstance(buffer, Half) else buffer)[index])


def _call(name: str, *arguments) -> None:
    T.evaluate(tirx.op.call_llvm_intrin("void", name, *arguments))


def _bytes(buffer: tirx.Buffer, number):
    return tirx.Cast("int64", as_expr(number)) * tvm_ffi.dtype(str(buffer.dtype)).itemsize


def prefetch(buffer: tirx.Buffer, index: tirx.PrimExpr, level: int = 2) -> None:
    """Prefetch the cache line of an element into the first- or second-level cache; the index may be
    out of bounds."""
    locality = const(4 - level)
    _call("llvm.prefetch", _address(buffer, index), const(0), locality, const(1))


@contextmanager
def when(condition: tirx.PrimExpr) -> Iterator[None]:
    """Emit the statements of a ``with`` body under a condition."""
    with T.If(condition), T.Then(), _block():
        yield


def either(
    condition: tirx.PrimExpr, then: Callable[[], None], otherwise: Callable[[], None]
) -> None:
    """Emit an if with both branches."""
    with T.If(condition):
        with T.Then(), _block():
            then()
        with T.Else(), _block():
            otherwise()


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
    ) -> None:
        """Store consecutive elements: all lanes, or the first ``number`` lanes."""
        if self._is_whole(number):
            store(buffer, self._ramp(index), vector)
        elif isinstance(buffer, Half):
            buffer.masked_store(vector, self._ramp(index), self._mask(number))
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
            rows = [bind(_shuffle(pair, lanes)) for pair in pairs for lanes in (low, high)]
        return rows

    def copy_transposed(
        self,
        source: tuple[tirx.Buffer, tirx.PrimExpr, Extent],
        left: tirx.PrimExpr | None,
        extent: Extent,
        target: tirx.Buffer,
        place: Callable,
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
        """
        buffer, start, step = source

        def square(k, number) -> None:
            size = as_expr(self.lanes if number is None else number)

            def row(i):
                exists = number if left is None else tirx.Select(left > i, size, const(0))
                return bind(self.load(buffer, start + i * step + k, exists))

            for i, column in enumerate(self.transpose([row(i) for i in range(self.lanes)])):
                if number is None or (isinstance(number, int) and i < number):
                    self.store(target, place(k + i), column)
                elif not isinstance(number, int):
                    with when(number > i):
                        self.store(target, place(k + i), column)

        self.each(int(extent) if isinstance(extent, IntImm) else extent, square)

    def deinterleave(self, parts: Sequence) -> list:
        """Return n vectors from n consecutive ones: the i-th holds every n-th element from element
        i on."""
        step = len(parts)
        if step == 1:
            return list(parts)
        ends = range(step * self.lanes, step * self.lanes + step)
        return [bind(_shuffle(parts, range(i, end, step))) for i, end in enumerate(ends)]

    def every(self, vector: tirx.PrimExpr, step: int) -> tirx.PrimExpr:
        """Return a vector that begins with every ``step``-th element of another."""
        return _shuffle([vector], (min(i * step, self.lanes - 1) for i in range(self.lanes)))

    def interleave(self, parts: Sequence) -> list:
        """Return the inverse of :meth:`deinterleave`."""
        if len(parts) == 1:
            return list(parts)
        order = [i * self.lanes + lane for lane in range(self.lanes) for i in range(len(parts))]
        starts = range(0, len(order), self.lanes)
        return [bind(_shuffle(parts, order[start : start + self.lanes])) for start in starts]

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
            vector = bind(combine(*halves))
        return vector

    def each(self, extent: Extent, emit: Callable, unroll: int = 1) -> None:
        """Emit ``emit(offset, number)`` for each vector of a row; number is None except in the
        last.

        A negative ``extent`` would write before the row.
        With ``unroll``, ``emit(offset, number, i)`` is repeated that many times in the body of the
        loop.
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
        else:
            done = bind(full * step)
            with serial(0, ceil_div(extent - done, self.lanes)) as i:
                offset = bind(done + i * self.lanes)
                call(offset, tirx.min(const(self.lanes), extent - offset), 0)

    def _is_whole(self, number) -> bool:
        return number is None or (isinstance(number, int) and number >= self.lanes)

    def _ramp(self, index):
        return Ramp(index, const(1), self.lanes)

    def _mask(self, number):
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
        self._vectors.store(*self._place(index), value)

    def _place(self, index: int):
        return self._buffers[index // self._each], index % self._each * self._vectors.lanes


def sum_of(terms: Iterable) -> tirx.PrimExpr:
    """Return the sum of expressions, added in their order."""
    return reduce(lambda a, b: a + b, terms)


def as_expr(extent: Extent) -> tirx.PrimExpr:
    """Return an extent as an expression."""
    return const(extent) if isinstance(extent, int) else extent


def as_float(extent: Extent) -> tirx.PrimExpr:
    """Return an extent as a float32."""
    if isinstance(extent, int):
        return tirx.const(float(extent), "float32")
    return tirx.Cast("float32", extent)


def _shuffle(vectors: Sequence, lanes: Iterable[int]):
    return Shuffle(list(vectors), [const(lane) for lane in lanes])


def _is_zero(extent: Extent) -> bool:
    return isinstance(extent, int) and extent == 0
