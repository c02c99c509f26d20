"""Transposed copies of rows of float32, by the function of :mod:`relax_grad.cpu.squares`.

A kernel has the definition of the function, which TVM inlines at each call.
:mod:`relax_grad.cpu.codegen.common` compiles it once for a program instead.
"""

from __future__ import annotations

import tvm.tirx.script.builder as T
from tvm import tirx

from ...squares import NAME, definition
from .extents import Extent, as_expr, const


def turn(
    lanes: int,
    source: tuple[tirx.Buffer, tirx.PrimExpr, Extent],
    rows: tuple[Extent, Extent],
    extent: Extent,
    target: tuple[tirx.Buffer, tirx.PrimExpr, Extent],
    runs: tuple[Extent, Extent] | None = None,
    stored: Extent | None = None,
    every: int = 1,
) -> None:
    """Emit a copy of ``lanes`` rows, transposed.

    Parameters
    ----------
    lanes : int
        The number of rows, one of :data:`LANES`.
    source : tuple
        A buffer of float32, the offset of the first row in it, and the stride of the rows.
    rows : tuple
        The last row that is read, whose elements later rows repeat, and the number of rows that
        are not 0.
    extent : int or tirx.PrimExpr
        The length of the rows.
    target : tuple
        The buffer of the copy, the offset of the first column in it, and the stride of the columns.
    runs : tuple, optional
        The number of columns that have this stride, and the stride of such runs of columns.
    stored : int or tirx.PrimExpr, optional
        The number of rows whose elements are stored; by default all.
    every : int
        The distance of the columns that are copied.
    """
    (buffer, start, step), (to, place, apart), (last, exist) = source, target, rows
    run, jump = (extent, const(0)) if runs is None else runs
    places = tirx.address_of(buffer[start]), tirx.address_of(to[place])
    call = tirx.call_extern(
        "int32",
        f"{NAME}{lanes}",
        places[0],
        _long(step),
        as_expr(last),
        as_expr(exist),
        _long(extent),
        _long(every),
        places[1],
        _long(apart),
        _long(run),
        _long(jump) - (_long(run) - 1) * _long(apart),
        as_expr(lanes if stored is None else stored),
    )
    with T.attr(0, "pragma_import_llvm", definition(lanes)):
        T.evaluate(call)


def _long(value: Extent) -> tirx.PrimExpr:
    return tirx.Cast("int64", as_expr(value))
