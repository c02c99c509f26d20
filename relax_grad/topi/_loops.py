"""Loops of tensors that are made of statements."""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence

from tvm import te, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from ._util import Shape, is_empty, is_static, zeros

#: Elements of an axis behind the indexed one that a parallel task of a scatter owns.
_CHUNK = 64


def extern(
    body: Callable,
    inputs: Sequence[te.Tensor],
    shape: Shape,
    dtype: str,
    name: str,
    state: tuple[Shape, str] | None = None,
) -> te.Tensor:
    """Make a tensor of statements.

    Parameters
    ----------
    body : Callable
        Emits the statements; takes the buffers of the inputs, of the state if there is one, and of the
        result.
    inputs : Sequence[te.Tensor]
        What the statements read.
    shape, dtype
        The type of the result.
    name : str
        The name of the result.
    state : tuple[Sequence[int or PrimExpr], str], optional
        Shape and dtype of a buffer to work in.

    Returns
    -------
    result : te.Tensor
        The result; zeros where it, or the state, is known to be empty.
    """
    types = [(shape, dtype)] if state is None else [state, (shape, dtype)]
    if any(is_empty(extents) for extents, _ in types):
        return zeros(shape, dtype)

    def generate(ins, outs):
        with IRBuilder() as builder:
            body(*ins, *outs)
            return builder.get()

    result = te.extern(
        [extents for extents, _ in types],
        inputs,
        generate,
        dtype=[kind for _, kind in types],
        out_buffers=[
            tirx.decl_buffer(extents, kind, label, layout=None)
            for (extents, kind), label in zip(
                types, ("out", "state")[: len(types)][::-1], strict=True
            )
        ],
        name=name,
        tag=name,
    )
    return result if state is None else result[-1]


@contextlib.contextmanager
def loops(extents: Sequence, reverse: bool = False) -> Iterator[list[tirx.PrimExpr]]:
    """Open a serial loop for each extent; ``reverse`` runs them from the last element to the first."""
    with contextlib.ExitStack() as stack:
        at = [stack.enter_context(T.serial(extent)) for extent in extents]
        yield [extent - 1 - i for i, extent in zip(at, extents, strict=True)] if reverse else at


def add(buffer: tirx.Buffer, at: Sequence, value: tirx.PrimExpr) -> None:
    """Add to an element of a buffer."""
    T.buffer_store(buffer, buffer[tuple(at)] + value, list(at))


@contextlib.contextmanager
def tasks(extents: Sequence) -> Iterator[list[tirx.PrimExpr]]:
    """Open a parallel loop over all elements of a shape and yield the indices of one.

    Only constants are divided by: under what TVM's simplifier knows within a loop, it takes a division out
    of one that an extent of 0 skips. So what follows a symbolic extent runs serially.
    """
    together = list(
        itertools.takewhile(lambda i: i == 0 or is_static(extents[i]), range(len(extents)))
    )
    fused, rest = extents[: len(together)], extents[len(together) :]
    with T.parallel(functools.reduce(operator.mul, fused, tirx.const(1, "int64"))) as flat:
        at = []
        for i, extent in reversed(list(enumerate(fused))):
            # The first index needs no remainder.
            at.append(tirx.floormod(flat, extent) if i else flat)
            flat = tirx.floordiv(flat, extent)
        with loops(rest) as inner:
            yield [*at[::-1], *inner]


class Chunks:
    """The axes behind an indexed one, divided among parallel tasks along the first of them.

    So tasks never write to the same element, and an embedding (axis 0) runs in parallel too.
    """

    def __init__(self, shape: Shape):
        self._shape = list(shape)
        self._size = max(1, _CHUNK // _static_size(self._shape[1:]))
        #: How many there are.
        self.count = tirx.ceildiv(self._shape[0], self._size) if shape else 1

    @contextlib.contextmanager
    def loops(self, chunk: tirx.PrimExpr) -> Iterator[list[tirx.PrimExpr]]:
        """Open loops over the elements of one chunk."""
        if not self._shape:
            yield []
            return
        start = chunk * self._size
        with loops([tirx.min(self._size, self._shape[0] - start), *self._shape[1:]]) as (i, *at):
            yield [start + i, *at]


def _static_size(shape: Shape) -> int:
    """Return the number of elements, or :data:`_CHUNK`, a large one, where it is not known."""
    if all(map(is_static, shape)):
        return max(1, functools.reduce(operator.mul, map(int, shape), 1))
    return _CHUNK
