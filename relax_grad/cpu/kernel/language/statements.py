"""The statements of generated kernels: blocks, loops, conditions, and the memory of buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeAlias

import tvm.tirx.script.builder as T
import tvm_ffi
from tvm import tirx
from tvm.tirx import IntImm

from .extents import Extent, as_expr, const
from .halves import Half

bind = T.Bind

#: The buffers allocated in each open block.
_SCOPES: ContextVar[list[list[tirx.Buffer]]] = ContextVar("scopes")

#: Whether parallel loops run in one thread.
_ONE_THREAD: ContextVar[bool] = ContextVar("one_thread", default=False)


#: Emits statements for some values, such as the index of a loop.
Emit: TypeAlias = "Callable[..., None]"


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
def _block() -> Iterator[None]:
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
    loop = T.serial if is_in_one_thread() else T.parallel
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


def is_in_one_thread() -> bool:
    """Tell whether parallel loops run in one thread."""
    return _ONE_THREAD.get()


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


def scratch(size: Extent, dtype: str = "float32") -> tirx.Buffer:
    """Allocate a buffer that lives until the end of the block or the function."""
    own = T.alloc_buffer([size], dtype, layout=None)
    # TVM computes the region that each access to a buffer touches, to allocate no more than that.
    # For a tile of scalars and vectors, this takes longer than the rest of the compilation.
    # Accesses through a second pointer avoid it. They also hide the buffer's lifetime from TVM: see
    # _block, which states it.
    _SCOPES.get()[-1].append(own)
    return T.decl_buffer([size], dtype, data=bind(own.data), layout=None)


def opaque(vector: tirx.PrimExpr) -> tirx.Var:
    """Bind a vector that TVM's simplifier does not look into.

    The simplifier replaces the uses of a bound value by its expression, so that vectors in several
    steps, such as a transposed square, are computed anew for each use, and LLVM spends its time on
    their removal. The intrinsic, a part of the vector which is all of it, is no pure function for
    TVM. LLVM removes it.
    """
    whole = "llvm.vector.extract", vector, tirx.const(0, "int64")
    return bind(tirx.op.call_llvm_intrin(str(vector.ty.dtype), *whole))


def computed(value: Extent) -> Extent:
    """Bind a number that TVM's simplifier does not look into: it visits the terms of a bound
    expression, and theirs, at every use."""
    if isinstance(value, (int, IntImm)):
        return value
    place = scratch(1, "int32")
    store(place, 0, value)
    return bind(place[0])


def store(
    buffer: tirx.Buffer,
    index: tirx.PrimExpr,
    value: tirx.PrimExpr,
    bias: tirx.PrimExpr | None = None,
) -> None:
    """Store one element. ``bias`` is added before rounding to half precision, if it is known."""
    if isinstance(buffer, Half):
        buffer.store(index, value, bias)
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


def _address(buffer: tirx.Buffer, index: tirx.PrimExpr) -> tirx.PrimExpr:
    return tirx.address_of((buffer.raw if isinstance(buffer, Half) else buffer)[index])


def _call(name: str, *arguments: tirx.PrimExpr) -> None:
    T.evaluate(tirx.op.call_llvm_intrin("void", name, *arguments))


def _bytes(buffer: tirx.Buffer, number: Extent) -> tirx.PrimExpr:
    return tirx.Cast("int64", as_expr(number)) * tvm_ffi.dtype(str(buffer.dtype)).itemsize


def prefetch(buffer: tirx.Buffer, index: tirx.PrimExpr, level: int = 2) -> None:
    """Prefetch the cache line of an element into the first- or second-level cache; the index may be
    out of bounds."""
    locality = const(4 - level)
    _call("llvm.prefetch", _address(buffer, index), const(0), locality, const(1))
