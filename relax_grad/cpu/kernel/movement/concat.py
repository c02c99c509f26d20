"""Concatenation and splitting: each part is copied to its place in the whole, or from it, row by
row.

A copy is LLVM's memcpy: one call of the C library, which copies in vectors, whatever the length of
a row. A row consists of the axis of the concatenation and all later axes. If there are few rows,
each is divided among several tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tvm_ffi
from tvm import tirx

from ...target import CPU
from ..language import builder as b
from ..language.builder import Extent, as_expr, bind, const
from ..language.halves import Tensor
from ._plans import CopyPlan, copy_plan


def concat(
    axis: int, shapes: Sequence[Sequence[Extent]], zeros: Sequence[int], dtype: str, cpu: CPU
) -> tirx.PrimFunc:
    """Return the kernel of the concatenation of tensors along an axis.

    Parameters
    ----------
    axis : int
        The axis.
    shapes : Sequence
        The shapes of the operands in their order, and of the result.
    zeros : Sequence[int]
        The indices of the operands that are zeros and not parameters of the function.
    dtype : str
        The dtype of all tensors.
    cpu : CPU
        The target CPU.

    Returns
    -------
    function : tirx.PrimFunc
        Takes the other operands and the result.
    """
    *operands, result = shapes

    def body(*buffers: Tensor) -> None:
        *sources, target = buffers
        tensors = iter(sources)
        parts = [None if i in zeros else next(tensors) for i in range(len(operands))]

        def copy(i: int, at: tirx.PrimExpr, start: tirx.PrimExpr, number: tirx.PrimExpr) -> None:
            if parts[i] is None:
                b.clear(target, at, number)
            else:
                b.copy(target, at, parts[i], start, number)

        _each(axis, shapes, dtype, cpu, copy)

    params = [(f"x{i}", shape, dtype) for i, shape in enumerate(operands) if i not in zeros]
    return b.prim_func("concat", [*params, ("result", result, dtype)], body)


def split(axis: int, shapes: Sequence[Sequence[Extent]], dtype: str, cpu: CPU) -> tirx.PrimFunc:
    """Return the kernel of the split of a tensor along an axis.

    Parameters
    ----------
    axis, dtype, cpu
        As for :func:`concat`.
    shapes : Sequence
        The shapes of the results in their order, and of the operand.

    Returns
    -------
    function : tirx.PrimFunc
        Takes the operand and the results.
    """
    *results, operand = shapes

    def body(source: Tensor, *parts: Tensor) -> None:
        def copy(i: int, at: tirx.PrimExpr, start: tirx.PrimExpr, number: tirx.PrimExpr) -> None:
            b.copy(parts[i], start, source, at, number)

        _each(axis, shapes, dtype, cpu, copy)

    params = [(f"y{i}", shape, dtype) for i, shape in enumerate(results)]
    return b.prim_func("split", [("x", operand, dtype), *params], body)


def _each(
    axis: int, shapes: Sequence[Sequence[Extent]], dtype: str, cpu: CPU, copy: Callable
) -> None:
    """Emit the copies between the parts of a tensor along an axis and the whole, whose shape is the
    last one.

    ``copy(i, at, start, number)`` copies elements of the i-th part: ``at`` is their offset in the
    whole, ``start`` their offset in the part.
    """
    plan = copy_plan(axis, shapes, tvm_ffi.dtype(dtype).itemsize, cpu)
    with (b.serial if plan.in_one_thread else b.parallel)(0, plan.outer * plan.shares) as task:
        n, share = bind(task // plan.shares), bind(task % plan.shares)
        at = bind(n * plan.row)
        for i, length in enumerate(plan.lengths):
            begin, number = _share(plan, share, length)
            copy(i, at + begin, n * length + begin, number)
            at = at + length


def _share(plan: CopyPlan, share: tirx.PrimExpr, length: Extent) -> tuple:
    """Return the offset and the number of elements of a share of a part's row."""
    if plan.shares == 1:
        return const(0), as_expr(length)
    step = plan.step(length)
    begin = bind(tirx.min(share * step, as_expr(length)))
    return begin, bind(tirx.min(as_expr(step), length - begin))
