"""Run kernels for the threads of a GPU on a CPU, one thread after the other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import tvm
import tvm_ffi
from tvm import tirx

#: A GPU target that TVM compiles for on any machine.
GPU = {"kind": "cuda", "arch": "sm_80", "host": {"kind": "llvm"}}

#: Whether the last thread runs first.
_backwards: ContextVar[bool] = ContextVar("backwards", default=False)


@contextlib.contextmanager
def in_threads(backwards: bool) -> Iterator[None]:
    """Make kernels for a GPU; their threads run in ascending order, or in descending order if
    ``backwards``.

    If the results do not depend on the order, no thread reads the writes of another.
    """
    token = _backwards.set(backwards)
    try:
        with tvm.target.Target(GPU):
            yield
    finally:
        _backwards.reset(token)


def without_threads(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return the function with serial loops in place of threads; functions without threads do not
    change."""

    def serial(loop: tirx.For) -> tirx.For:
        if loop.kind != tirx.ForKind.THREAD_BINDING:
            return loop
        variable, body = loop.loop_var, loop.body
        if _backwards.get():
            variable = tirx.Var(f"{variable.name}_turn", variable.ty)
            # Hidden from the simplifier, which divides descending indices wrongly.
            at = tirx.call_pure_extern("int64", "labs", loop.extent - 1 - variable)
            body = tirx.SeqStmt([tirx.Bind(loop.loop_var, at), body])
        return tirx.For(variable, loop.min, loop.extent, tirx.ForKind.SERIAL, body)

    return function.with_body(tvm_ffi.structural_map(function.body, (tirx.For, serial)))


def threads_of(function: tirx.PrimFunc) -> list[tuple[tirx.PrimExpr, tirx.PrimExpr]]:
    """Return the numbers of blocks and of threads in a block of each kernel of a function."""
    extents = {"blockIdx.x": [], "threadIdx.x": []}

    def visit(loop: tirx.For) -> None:
        if loop.kind == tirx.ForKind.THREAD_BINDING:
            extents[loop.thread_binding.thread_tag].append(loop.extent)

    tvm_ffi.structural_walk(function.body, (tirx.For, visit))
    return list(zip(*extents.values(), strict=True))


def stores_outside_threads(function: tirx.PrimFunc) -> list[tirx.BufferStore]:
    """Return the stores of a function that run on the host, outside of all GPU threads."""
    stores = []

    def without(loop: tirx.For) -> tirx.Stmt:
        inside = loop.kind == tirx.ForKind.THREAD_BINDING
        return tirx.Evaluate(0) if inside else loop

    host = tvm_ffi.structural_map(function.body, (tirx.For, without))
    tvm_ffi.structural_walk(host, (tirx.BufferStore, stores.append))
    return stores
