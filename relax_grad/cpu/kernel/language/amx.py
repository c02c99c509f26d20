"""The unit of Intel's processors for tiles of bfloat16 (AMX), as functions that kernels call.

A tile has up to 16 rows of 64 bytes. ``tdpbf16ps`` adds the product of a tile of A, rows of 16
pairs of consecutive k, and of a tile of B, 16 pairs of k in 16 columns, to a tile of 16 x 16 sums
in float32. Here up to 2 x 2 such sums are computed at once: 32 rows and 32 columns.

Linux lets a process use the unit once it has asked (``arch_prctl``). The first call asks, and
:func:`imported` carries the answer in a variable of the object file. Without the unit, or without
permission, the same functions compute the same sums with AVX-512, in the order that Intel's manual
gives for ``tdpbf16ps``: the even and the odd elements of 16 pairs are summed apart with fused
multiply-adds, their sum is added to the tile; denormal numbers are zero. Results are equal to the
bit.

The tiles are registers of a thread, from :func:`begin` to :func:`end`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import tvm.tirx.script.builder as T
from tvm import tirx

from ...target import CPU
from . import builder as b
from ._amx_code import COLUMNS, LANES, LLVM, ROWS, STEPS
from .builder import Extent, as_expr, const
from .halves import Half, Tensor

__all__ = [
    "COLUMNS",
    "LANES",
    "ROWS",
    "SIZE",
    "STEPS",
    "add",
    "begin",
    "clear",
    "imported",
    "load",
    "scratch",
    "store",
    "takes_tiles",
    "tiles",
]

#: The elements of the sums.
SIZE = ROWS * COLUMNS


def takes_tiles(cpu: CPU, *factors: Tensor) -> bool:
    """Tell whether the factors of a product are bfloat16, and the CPU multiplies their tiles."""
    return cpu.tiles and all(isinstance(x, Half) and x.dtype == "bfloat16" for x in factors)


def imported() -> AbstractContextManager[object]:
    """Return the frame of statements that may call the functions of this module."""
    return T.attr(0, "pragma_import_llvm", LLVM)


@contextmanager
def tiles(rows: Extent = ROWS) -> Iterator[None]:
    """Emit statements that use the tiles of a thread, for sums of some rows: 1 to 32."""
    begin(rows)
    yield
    _call("end")


def begin(rows: Extent = ROWS) -> None:
    """Emit the configuration of the tiles for sums of some rows. It sets the tiles to 0."""
    _call("begin", _long(rows))


def clear(sums: tirx.Buffer, rows: Extent = ROWS, start: Extent = 0) -> None:
    """Emit the sums of nothing.

    ``sums`` is a buffer of float32 that has them, ``[row][32]`` for 32 rows, from ``start`` on.
    Between this function and :func:`store`, they are in tiles or in the buffer.
    """
    _call("clear", _at(sums, start), _long(rows))


def load(sums: tirx.Buffer, rows: Extent = ROWS, start: Extent = 0) -> None:
    """Emit the load of the tiles from the sums, to which more is added."""
    _call("load", _at(sums, start), _long(rows))


def add(
    sums: tirx.Buffer,
    a: tuple,
    panel: tuple,
    steps: Extent,
    rows: Extent = ROWS,
    vectors: Extent = 2,
    start: Extent = 0,
) -> None:
    """Emit the addition of a product to sums.

    Parameters
    ----------
    sums : tirx.Buffer
        The sums.
    a : tuple
        A buffer, the offset of the first row in it, and the distance of rows in bytes. A row has
        ``16 * steps`` pairs of bfloat16.
    panel : tuple
        A buffer, the offset of the first row in it, and the distance of rows in bytes. There are
        ``16 * steps`` rows, of ``16 * vectors`` pairs.
    steps : int or tirx.PrimExpr
        The number of tiles of k.
    rows : int or tirx.PrimExpr
        The rows: at most as many as :func:`begin` was given, and 16 or exactly as many.
    vectors : int or tirx.PrimExpr
        The tiles of columns: 1 or 2.
    start : int or tirx.PrimExpr
        The offset of the sums.
    """
    (left, at, pitch), (right, first, width) = a, panel
    places = _at(left, at), _long(pitch), _at(right, first), _long(width)
    _call("add", _at(sums, start), *places, _long(steps), _long(rows), _long(vectors))


def store(sums: tirx.Buffer, rows: Extent = ROWS, start: Extent = 0) -> None:
    """Emit the store of the tiles to the sums."""
    _call("store", _at(sums, start), _long(rows))


def scratch(number: int = 1) -> tirx.Buffer:
    """Allocate some sums, and a vector after them, so that the last ones may be read in a
    vector."""
    sums = b.scratch(number * SIZE + LANES)
    b.clear(sums, const(number * SIZE), LANES)
    return sums


def _call(name: str, *arguments: tirx.PrimExpr) -> None:
    T.evaluate(tirx.call_extern("int32", f"relax_grad_tiles_{name}", *arguments))


def _at(buffer: Tensor, index: Extent) -> tirx.PrimExpr:
    return tirx.address_of((buffer.raw if isinstance(buffer, Half) else buffer)[index])


def _long(value: Extent) -> tirx.PrimExpr:
    return tirx.Cast("int64", as_expr(value))
