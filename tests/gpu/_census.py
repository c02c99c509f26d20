"""The kernels of a module for a GPU, and the share of the GPU that each keeps busy.

Only TVM's passes up to its schedules run: neither a device nor a compiler of CUDA is necessary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import tvm
from compile_cuda import TARGET
from tvm import relax, tirx
from tvm.s_tir import dlight

__all__ = ["MULTIPROCESSORS", "Kernel", "kernels_of"]

#: The multiprocessors of an H100.
MULTIPROCESSORS = 132

_RULES = (
    *(dlight.gpu.Matmul(), dlight.gpu.GEMV(), dlight.gpu.Reduction()),
    *(dlight.gpu.GeneralReduction(), dlight.gpu.Fallback()),
)


@dataclass(frozen=True)
class Kernel:
    """A kernel: the name of its function, the blocks, the threads of a block, and the steps of the
    loops of a thread. Extents that are not known count as 1."""

    name: str
    blocks: int
    threads: int
    steps: int

    @property
    def work(self) -> int:
        """The steps of all threads."""
        return self.blocks * self.threads * self.steps

    @property
    def imbalance(self) -> float:
        """The work of the busiest multiprocessor, relative to that of an even distribution."""
        return -(-self.blocks // MULTIPROCESSORS) * MULTIPROCESSORS / self.blocks


def kernels_of(module: tvm.IRModule) -> list[Kernel]:
    """Return the kernels of all functions of a module, which TVM's default pipeline schedules."""
    passes = [
        relax.transform.LegalizeOps(),
        relax.transform.AnnotateTIROpPattern(),
        relax.transform.FoldConstant(),
        relax.transform.FuseOps(),
        relax.transform.FuseTIR(),
        dlight.ApplyDefaultSchedule(*_RULES),
    ]
    with TARGET:
        scheduled = tvm.transform.Sequential(passes)(module)
    return [
        kernel
        for variable, function in scheduled.functions_items()
        if isinstance(function, tirx.PrimFunc)
        for kernel in _kernels(variable.name_hint, function)
    ]


def _kernels(name: str, function: tirx.PrimFunc) -> Iterator[Kernel]:
    """Yield the kernels of a scheduled function: its outermost loops."""
    body = function.body
    while not isinstance(body, (tirx.For, tirx.SeqStmt)):
        within = _within(body)
        if within is None:
            return
        body = within
    for nest in body.seq if isinstance(body, tirx.SeqStmt) else [body]:
        bound: dict[str, int] = {}
        steps = _visit(nest, bound)
        threads = _product(bound, "threadIdx")
        yield Kernel(name, _product(bound, "blockIdx"), threads, steps)


def _within(stmt: tirx.Stmt) -> tirx.Stmt | None:
    """Return the statement in a block or an attribute, or None."""
    block = getattr(stmt, "block", None)
    return block if block is not None else getattr(stmt, "body", None)


def _product(bound: Mapping[str, int], kind: str) -> int:
    product = 1
    for tag, extent in bound.items():
        product *= extent if tag.startswith(kind) else 1
    return product


def _visit(stmt: tirx.Stmt | None, bound: dict[str, int]) -> int:
    """Return the steps of a thread in a statement; note the extents of bound loops."""
    if isinstance(stmt, tirx.SeqStmt):
        return max(_visit(part, bound) for part in stmt.seq)
    if isinstance(stmt, tirx.IfThenElse):
        return max(_visit(stmt.then_case, bound), _visit(stmt.else_case, bound))
    if stmt is None or isinstance(stmt, tirx.BufferStore):
        return 1
    if not isinstance(stmt, tirx.For):
        return _visit(_within(stmt), bound)
    extent = int(stmt.extent) if isinstance(stmt.extent, tirx.IntImm) else 1
    if stmt.thread_binding is None:
        return extent * _visit(stmt.body, bound)
    tag = stmt.thread_binding.thread_tag
    if "Idx" in tag:
        bound[tag] = max(extent, bound.get(tag, 1))
        return _visit(stmt.body, bound)
    return extent * _visit(stmt.body, bound)  # a virtual thread
