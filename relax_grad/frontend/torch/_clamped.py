"""Extents that are 0 for few rows, where torch.export counts on.

The graph of ``x[2:]`` has the extent ``n - 2``. Of one row, Python takes none: the extent is
``max(n - 2, 0)``. Other extents of the graph may then be wrong, such as the extent of a
concatenation, so that the graph runs once with fake tensors for each such number of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import sympy
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

#: The number of rows from which no extent may be negative.
_MOST = 16

#: The value of the symbols that are not tried, which no product or sum makes 0.
_OTHER = 97


class Clamped:
    """The extents of a graph that are 0 instead of a negative number.

    Attributes
    ----------
    extents : set[sympy.Expr]
        The extents.
    refused : list[tuple[sympy.Symbol, int]]
        The symbols and their values for which the graph has other extents than PyTorch.
    """

    def __init__(self, graph: fx.GraphModule):
        self.extents: set[sympy.Expr] = set()
        self.refused: list[tuple[sympy.Symbol, int]] = []
        values = [node.meta.get("val") for node in graph.graph.nodes]
        found = {extent for value in values for extent in _extents(value)}
        for symbol in sorted({s for extent in found for s in extent.free_symbols}, key=str):
            own = [extent for extent in found if extent.free_symbols == {symbol}]
            small = [n for n in range(_MOST) if any(_at(e, symbol, n) < 0 for e in own)]
            if not small or _MOST - 1 in small:
                continue
            wrong = [n for n in small if not _holds(graph, symbol, n)]
            if len(wrong) < len(small):
                self.refused += [(symbol, n) for n in wrong]
                self.extents |= {e for e in own if any(_at(e, symbol, n) < 0 for n in small)}


def _extents(value: Any) -> Iterator[sympy.Expr]:
    """Yield the symbolic extents of tensors."""
    for tensor in value if isinstance(value, (list, tuple)) else [value]:
        for extent in tensor.shape if isinstance(tensor, torch.Tensor) else ():
            expr = extent.node.expr if isinstance(extent, torch.SymInt) else None
            if expr is not None and not expr.is_Symbol and _is_known(expr):
                yield expr


def _is_known(extent: sympy.Expr) -> bool:
    """Tell whether an extent is a number where its symbols are."""
    return extent.xreplace(dict.fromkeys(extent.free_symbols, sympy.Integer(_OTHER))).is_Integer


def _at(extent: sympy.Expr, symbol: sympy.Symbol, number: int) -> int:
    """Return an extent for a value of a symbol; others have a large one."""
    others = dict.fromkeys(extent.free_symbols, sympy.Integer(_OTHER))
    return int(extent.xreplace({**others, symbol: sympy.Integer(number)}))


def _shape(value: Any, symbol: sympy.Symbol, number: int) -> list[int]:
    return [
        max(_at(extent.node.expr, symbol, number), 0)
        if isinstance(extent, torch.SymInt)
        else extent
        for extent in value.shape
    ]


def _holds(graph: fx.GraphModule, symbol: sympy.Symbol, number: int) -> bool:
    """Tell whether a graph has these extents in PyTorch too, with 0 for negative ones."""

    class Checked(fx.Interpreter):
        def run_node(self, node: fx.Node) -> Any:
            result, value = super().run_node(node), node.meta.get("val")
            pairs = [(result, value)]
            if isinstance(value, (list, tuple)):
                pairs = list(zip(result, value, strict=True))
            for one, expected in pairs:
                if isinstance(expected, torch.Tensor):
                    if [*one.shape] != _shape(expected, symbol, number):
                        raise ValueError("another shape")
                elif isinstance(expected, torch.SymInt) and not expected.node.expr.is_Symbol:
                    # It may be computed of the extent of a slice, which the graph does not tell.
                    raise ValueError("a number that may differ")
            return result

    values = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    with FakeTensorMode(allow_non_fake_inputs=True):
        try:
            arguments = [
                torch.empty(_shape(value, symbol, number), dtype=value.dtype)
                if isinstance(value, torch.Tensor)
                else value
                for value in values
            ]
            Checked(graph).run(*arguments)
        except Exception:  # operators raise every kind
            return False
    return True
