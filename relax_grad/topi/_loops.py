"""Loops for tensors that statements compute, for CPUs and, if the target in scope is a GPU, for
GPUs."""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence

from tvm import te, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from .util import Shape, is_empty, is_static, on_gpu, zeros

#: Elements of the axes after the indexed one that a parallel task of a scatter owns on a CPU.
_CHUNK = 64

#: Threads of a block of a GPU: a number that every kind of GPU supports.
_THREADS = 256

#: A sufficient number of threads of a kernel, if more threads would repeat each other's work.
_ENOUGH = 4**8


def extern(
    body: Callable,
    inputs: Sequence[te.Tensor],
    shape: Shape,
    dtype: str,
    name: str,
    state: tuple[Shape, str] | None = None,
) -> te.Tensor:
    """Make a tensor from statements, with a scratch buffer if they need one.

    Parameters
    ----------
    body : Callable
        Emits the statements; takes the buffers of the inputs, of the state if there is one, and of
        the result.
    inputs : Sequence[te.Tensor]
        The tensors that the statements read.
    shape, dtype
        The type of the result.
    name : str
        The name of the result.
    state : tuple[Sequence[int or PrimExpr], str], optional
        Shape and dtype of the scratch buffer.

    Returns
    -------
    result : te.Tensor
        The result; zeros if it, or the state, is known to be empty.
    """
    types = [(shape, dtype)] if state is None else [state, (shape, dtype)]
    if any(is_empty(extents) for extents, _ in types):
        return zeros(shape, dtype)

    return statements(body, inputs, types, name)[-1]


def statements(
    body: Callable, inputs: Sequence[te.Tensor], outputs: Sequence[tuple[Shape, str]], name: str
) -> list[te.Tensor]:
    """Make tensors from statements: ``body`` takes the buffers of the inputs and of the outputs."""

    def generate(ins: Sequence[tirx.Buffer], outs: Sequence[tirx.Buffer]) -> tirx.Stmt:
        with IRBuilder() as builder:
            body(*ins, *outs)
            return builder.get()

    result = te.extern(
        [shape for shape, _ in outputs],
        inputs,
        generate,
        dtype=[dtype for _, dtype in outputs],
        out_buffers=[
            tirx.decl_buffer(shape, dtype, f"out{i}", layout=None)
            for i, (shape, dtype) in enumerate(outputs)
        ],
        name=name,
        tag=name,
    )
    return [result] if isinstance(result, te.Tensor) else list(result)


@contextlib.contextmanager
def loops(extents: Sequence, reverse: bool = False) -> Iterator[list[tirx.PrimExpr]]:
    """Open a serial loop for each extent; ``reverse`` runs them from the last element to the
    first."""
    with contextlib.ExitStack() as stack:
        at = [stack.enter_context(T.serial(extent)) for extent in extents]
        yield [extent - 1 - i for i, extent in zip(at, extents, strict=True)] if reverse else at


def add(buffer: tirx.Buffer, at: Sequence, value: tirx.PrimExpr) -> None:
    """Add a value to an element of a buffer."""
    T.buffer_store(buffer, buffer[tuple(at)] + value, list(at))


@contextlib.contextmanager
def tasks(extents: Sequence, inner: Sequence = ()) -> Iterator[list[tirx.PrimExpr]]:
    """Open a parallel loop over all elements of a shape and yield the indices of one.

    On a GPU every element has its own thread, and neighbouring threads have neighbouring last
    indices.

    On a CPU indices are only divided by constants: TVM's simplifier hoists a division out of a loop
    that an extent of 0 skips. So the axes from the first symbolic extent on, except the first axis,
    run serially.

    Parameters
    ----------
    extents : Sequence[int or PrimExpr]
        The shape.
    inner : Sequence[int or PrimExpr]
        Further extents, which a parallel task of a CPU loops over serially.
    """
    if on_gpu():
        with _threads([*extents, *inner]) as at:
            yield at
        return
    together = list(
        itertools.takewhile(lambda i: i == 0 or is_static(extents[i]), range(len(extents)))
    )
    fused, rest = extents[: len(together)], [*extents[len(together) :], *inner]
    with T.parallel(_size(fused)) as flat, loops(rest) as behind:
        yield [*_unravel(flat, fused), *behind]


@contextlib.contextmanager
def _threads(extents: Sequence) -> Iterator[list[tirx.PrimExpr]]:
    """Map every element of a shape to a GPU thread; an empty shape to none."""
    total = _size(extents)
    # The grid is never empty: an empty grid cannot be launched.
    blocks = tirx.max(tirx.ceildiv(total, _THREADS), tirx.const(1, "int64"))
    with (
        T.thread_binding(blocks, thread="blockIdx.x") as block,
        T.thread_binding(tirx.const(_THREADS, "int64"), thread="threadIdx.x") as thread,
    ):
        flat = block * _THREADS + thread
        with T.If(flat < total), T.Then():
            yield [once(i) for i in _unravel(flat, extents)]


def once(value: tirx.PrimExpr) -> tirx.PrimExpr:
    """Return an integer that is used several times; on a GPU as a variable, to compute it once.

    LLVM eliminates common subexpressions itself. TVM emits long CUDA expressions, and repeats those
    with conditions.
    """
    if not on_gpu():
        return value
    # TVM does not compile a variable of an 8-bit type.
    return T.bind(value.astype("uint64" if str(value.ty.dtype).startswith("uint") else "int64"))


class Chunks:
    """The elements written at indices, partitioned among parallel tasks so that no two tasks write
    the same element.

    On a CPU a task owns a chunk of the axes after the indexed ones, split along the first of them.
    So an embedding (axis 0) runs in parallel too.

    On a GPU a task is a thread. It owns one element of the trailing axes, so that neighbouring
    threads read and write neighbouring elements. If the trailing and leading axes give too few
    threads, the elements of the indexed axes are distributed among several threads: element ``i``
    belongs to share ``i % shares``. Each of these threads loops over all indices, and only
    processes its share. So the order of the updates of an element is the same on CPU
    and GPU, whatever the indices.

    Parameters
    ----------
    behind : Sequence[int or PrimExpr]
        The extents of the trailing axes, after the indexed ones.
    indexed : Sequence[int or PrimExpr]
        The extents of the indexed axes, whose elements may be distributed.
    before : Sequence[int or PrimExpr]
        The extents of the leading axes; each of their elements has its own task.
    """

    def __init__(self, behind: Shape, indexed: Shape = (), before: Shape = ()):
        self._before, self._indexed, self._behind = list(before), list(indexed), list(behind)
        self._on_gpu = on_gpu()
        self._shares = tirx.const(1, "int64")
        self._extents = []
        if self._on_gpu:
            self._shares = _share_count(_size(indexed), _size([*before, *behind]))
        elif behind:
            self._length = max(1, _CHUNK // _static_size(self._behind[1:]))
            self._extents = [tirx.ceildiv(behind[0], self._length)]
        self._is_shared = not (is_static(self._shares) and int(self._shares) == 1)
        #: Whether there is nothing to divide, so that all is one task.
        self.is_one_task = not self._on_gpu and not before and not behind

    @contextlib.contextmanager
    def tasks(self) -> Iterator[tuple[list[tirx.PrimExpr], list[tirx.PrimExpr]]]:
        """Open a parallel loop over the tasks.

        Yields the indices of the leading axes, and the chunk of the task, an argument of the other
        methods.
        """
        count = len(self._before)
        if not self._on_gpu:
            with tasks([*self._before, *self._extents]) as at:
                yield at[:count], at[count:]
            return
        # The share is the first index, so that only the extents divide it.
        with tasks([self._shares, *self._before, *self._behind]) as (share, *at):
            yield at[:count], [share, *at[count:]]

    @contextlib.contextmanager
    def loops(self, chunk: Sequence[tirx.PrimExpr]) -> Iterator[list[tirx.PrimExpr]]:
        """Open loops over the elements of one chunk of the trailing axes."""
        if self._on_gpu:
            yield list(chunk[1:])
            return
        if not self._behind:
            yield []
            return
        start = chunk[0] * self._length
        length = tirx.min(self._length, self._behind[0] - start)
        with loops([length, *self._behind[1:]]) as (i, *at):
            yield [start + i, *at]

    @contextlib.contextmanager
    def own(self, chunk: Sequence[tirx.PrimExpr]) -> Iterator[list[tirx.PrimExpr]]:
        """Open loops over all elements that the task owns, of the indexed and of the trailing
        axes."""
        with contextlib.ExitStack() as stack:
            if not self._is_shared:
                at = stack.enter_context(loops(self._indexed))
            else:
                number = _size(self._indexed)
                turns = tirx.truncdiv(number + (self._shares - 1), self._shares)
                (turn,) = stack.enter_context(loops([turns]))
                flat = once(turn * self._shares + chunk[0])
                stack.enter_context(T.If(flat < number))
                stack.enter_context(T.Then())
                at = _unravel(flat, self._indexed)
            yield [*at, *stack.enter_context(self.loops(chunk))]

    def owns(
        self, chunk: Sequence[tirx.PrimExpr], where: Sequence[tirx.PrimExpr]
    ) -> tirx.PrimExpr | None:
        """Return the condition that an element of the indexed axes belongs to the task; None if it
        always holds.

        An out-of-bounds index belongs to exactly one task too.
        """
        if not self._is_shared:
            return None
        flat = functools.reduce(
            lambda total, pair: total * pair[1] + pair[0],
            zip(where, self._indexed, strict=True),
            tirx.const(0, "int64"),
        )
        # The divisor is a power of two, so this is the remainder, also of a negative number.
        return tirx.bitwise_and(flat, self._shares - 1) == chunk[0]

    @contextlib.contextmanager
    def if_owned(
        self, chunk: Sequence[tirx.PrimExpr], *places: Sequence[tirx.PrimExpr]
    ) -> Iterator[None]:
        """Run statements if at least one of the places satisfies :meth:`owns`."""
        conditions = [self.owns(chunk, where) for where in places]
        with contextlib.ExitStack() as stack:
            if all(condition is not None for condition in conditions):
                stack.enter_context(T.If(tirx.any(*conditions)))
                stack.enter_context(T.Then())
            yield


def _share_count(number: tirx.PrimExpr, others: tirx.PrimExpr) -> tirx.PrimExpr:
    """Return the number of threads that share a number of elements: a power of 4.

    Together with the other threads these are up to :data:`_ENOUGH`. The share count is also limited
    by the number of elements, if it is known. If the number of other threads is unknown,
    comparisons choose the count at run time. They need no division, which extents of 0 forbid.
    """
    count = tirx.const(1, "int64")
    known = is_static(others)
    for power in range(1, _ENOUGH.bit_length()) if known else (2, 4, 6):
        shares = 4**power
        if shares > _ENOUGH or (is_static(number) and shares >= 4 * int(number)):
            break
        if not known:
            count = tirx.Select(others <= _ENOUGH // shares, tirx.const(shares, "int64"), count)
        elif int(others) <= _ENOUGH // shares:
            count = tirx.const(shares, "int64")
    return count


def _unravel(flat: tirx.PrimExpr, extents: Sequence) -> list[tirx.PrimExpr]:
    """Return the indices of an element of a shape from its row-major number."""
    at = []
    for i, extent in reversed(list(enumerate(extents))):
        # Both divisions agree for non-negative operands. TVM simplifies floordiv better, but
        # floordiv must handle the sign of an unknown divisor.
        static = is_static(extent)
        div, mod = (tirx.floordiv, tirx.floormod) if static else (tirx.truncdiv, tirx.truncmod)
        # The first index needs no remainder.
        at.append(mod(flat, extent) if i else flat)
        flat = div(flat, extent)
    return at[::-1]


def _size(shape: Sequence) -> tirx.PrimExpr:
    return functools.reduce(operator.mul, shape, tirx.const(1, "int64"))


def _static_size(shape: Shape) -> int:
    """Return the number of elements, or :data:`_CHUNK`, a large number, if it is unknown."""
    if all(map(is_static, shape)):
        return max(1, functools.reduce(operator.mul, map(int, shape), 1))
    return _CHUNK
