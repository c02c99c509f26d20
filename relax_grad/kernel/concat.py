"""Concatenation: each operand is copied to its place, row by row.

A copy is LLVM's, which the C library does in as many vectors as there are, and which costs one call of code however
long a row is. A row is what lies behind the axis of the concatenation; where there are few rows, each is divided.
"""

from __future__ import annotations

from collections.abc import Sequence

import tvm_ffi
from tvm import tirx

from ..target import CPU
from . import _builder as b
from ._builder import Extent, as_expr, bind, ceil_div, const, count

#: Bytes that one thread copies before a second one has woken up.
_SMALL = 2**17

#: Bytes that a part of a row has, at least.
_PART = 2**14

#: Bytes where parts of a row begin: multiples of a cache line.
_LINE = 64


def concat(
    axis: int, shapes: Sequence[Sequence[Extent]], zeros: Sequence[int], dtype: str, cpu: CPU
) -> tirx.PrimFunc:
    """Return the concatenation of tensors along an axis.

    Parameters
    ----------
    axis : int
        The axis.
    shapes : Sequence
        The shapes of the operands in their order, and of the result.
    zeros : Sequence[int]
        Which of the operands are 0 and no arguments.
    dtype : str
        The dtype of all.
    cpu : CPU
        What the function is for.

    Returns
    -------
    function : tirx.PrimFunc
        Takes the other operands, and the result.
    """
    *operands, result = shapes
    outer, inner = count(result[:axis]), count(result[axis + 1 :])
    lengths = [shape[axis] * inner for shape in operands]
    row, size = result[axis] * inner, tvm_ffi.dtype(dtype).itemsize
    parts = _parts(outer, row, size, cpu)

    def body(*buffers) -> None:
        *sources, target = buffers
        given = iter(sources)
        of = [None if i in zeros else next(given) for i in range(len(operands))]

        def copy(n, part) -> None:
            start = bind(n * row)
            for source, length in zip(of, lengths, strict=True):
                begin, number = _share(part, length, parts, size)
                if source is None:
                    b.clear(target, start + begin, number)
                else:
                    b.copy(target, start + begin, source, n * length + begin, number)
                start = start + length

        is_small = isinstance(outer * row, int) and outer * row * size < _SMALL
        with (b.serial if is_small else b.parallel)(0, outer * parts) as task:
            copy(bind(task // parts), bind(task % parts))

    names = [f"x{i}" for i in range(len(operands))]
    params = [(name, shape, dtype) for name, shape in zip(names, operands, strict=True)]
    params = [each for i, each in enumerate(params) if i not in zeros]
    return b.prim_func("concat", [*params, ("result", result, dtype)], body)


def _parts(outer: Extent, row: Extent, size: int, cpu: CPU) -> int:
    """Return in how many parts rows are copied, so that there are several tasks for each core."""
    if not isinstance(outer, int) or outer >= 4 * cpu.cores:
        return 1
    most = ceil_div(4 * cpu.cores, outer)
    return max(1, min(most, row * size // _PART)) if isinstance(row, int) else most


def _share(part, length: Extent, parts: int, size: int) -> tuple:
    """Return where a part of a row of an operand begins, and how many elements it has."""
    if parts == 1:
        return const(0), as_expr(length)
    line = max(1, _LINE // size)
    step = ceil_div(ceil_div(length, parts), line) * line
    begin = bind(tirx.min(part * step, as_expr(length)))
    return begin, bind(tirx.min(as_expr(step), length - begin))
