"""Symbolic extents of torch.export as expressions of TVM."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import sympy
import torch
from tvm import tirx

from ._converters import Refused

#: The beginnings of the names of symbols that depend on values.
_UNKNOWN = ("u", "zuf")

_REMAINDERS = ("Mod", "PythonMod")


class Symbols:
    """The symbolic extents of one function.

    Parameters
    ----------
    names : Mapping[str, str]
        The names of symbols, where they differ from those that torch.export gives them.
    clamped : Collection[sympy.Expr]
        The extents of tensors that are 0 where they would be negative.
    """

    def __init__(self, names: Mapping[str, str], clamped: Collection[sympy.Expr] = ()):
        self._names, self._clamped = names, clamped
        self._variables: dict[str, tirx.Var] = {}

    @property
    def variables(self) -> list[tirx.Var]:
        """The symbols of the extents that were converted."""
        return [*self._variables.values()]

    def extents(self, shape: torch.Size) -> list[int | tirx.Expr]:
        """Return the extents of a shape."""
        return [self._extent(extent) for extent in shape]

    def _extent(self, value: int | torch.SymInt) -> int | tirx.Expr:
        extent = self.expression(value)
        is_clamped = isinstance(value, torch.SymInt) and value.node.expr in self._clamped
        return tirx.max(extent, tirx.IntImm("int64", 0)) if is_clamped else extent

    def expression(self, value: int | torch.SymInt) -> int | tirx.Expr:
        """Return an integer of torch.export as a number or as an expression of int64."""
        if isinstance(value, torch.SymInt):
            value = value.node.expr
        if isinstance(value, (int, sympy.Integer)):
            return int(value)
        return self._of(value)

    def conditions(self, exported: torch.export.ExportedProgram) -> Iterator[tuple[tirx.Expr, str]]:
        """Yield the conditions on extents under which a graph computes what the module does, and
        their texts: ranges, and comparisons that the module made while it was traced."""
        for symbol, bounds in exported.range_constraints.items():
            if not isinstance(symbol, sympy.Symbol) or str(symbol).startswith(_UNKNOWN):
                continue
            extent = self._of(symbol)
            # The lower bound is 2 if there is none: graphs hold for an extent of 1, too.
            if isinstance(bounds.lower, sympy.Integer) and bounds.lower > 2:
                yield extent >= int(bounds.lower), f"{extent.name} >= {bounds.lower}"
            if isinstance(bounds.upper, sympy.Integer):
                yield extent <= int(bounds.upper), f"{extent.name} <= {bounds.upper}"
        for guard in _guards(exported):
            yield from self._compared(guard)

    def _compared(self, guard: sympy.Basic) -> Iterator[tuple[tirx.Expr, str]]:
        """Yield the condition that a multiple is a multiple, or that an extent is not a number."""
        if not isinstance(guard, (sympy.Eq, sympy.Ne)) or not isinstance(guard.rhs, sympy.Integer):
            return
        is_multiple = isinstance(guard, sympy.Eq) and type(guard.lhs).__name__ in _REMAINDERS
        is_other = isinstance(guard, sympy.Ne) and isinstance(guard.lhs, sympy.Symbol)
        if is_multiple or (is_other and guard.rhs > 1):
            try:
                extent = self._of(guard.lhs)
            except Refused:
                return
            sign, compare = ("==", tirx.EQ) if is_multiple else ("!=", tirx.NE)
            number = tirx.IntImm("int64", int(guard.rhs))
            yield compare(extent, number), f"{extent} {sign} {guard.rhs}"

    def _variable(self, symbol: sympy.Symbol) -> tirx.Var:
        name = str(symbol)
        if name.startswith(_UNKNOWN):
            raise Refused(
                "its shape depends on values, which Relax differentiates for fixed shapes only"
            )
        if name not in self._variables:
            self._variables[name] = tirx.Var(self._names.get(name, name), "int64")
        return self._variables[name]

    def _of(self, value: Any) -> tirx.Expr:
        if isinstance(value, sympy.Symbol):
            return self._variable(value)
        # Numbers of Python's float type stand in extents such as int(2.0 * float(height)).
        if isinstance(value, (sympy.Integer, sympy.Float)) and float(value).is_integer():
            return tirx.IntImm("int64", int(value))
        args = [self._of(arg) for arg in value.args] if isinstance(value, sympy.Expr) else []
        kind = type(value).__name__
        if kind == "Pow" and isinstance(value.args[1], sympy.Integer) and value.args[1] > 0:
            args, kind = [args[0]] * int(value.args[1]), "Mul"
        if kind not in _FUNCTIONS or not args:
            raise Refused(f"the extent {value} has no form in TVM")
        if len(args) == 1:
            return _FUNCTIONS[kind](args[0])
        result = args[0]
        for arg in args[1:]:
            result = _FUNCTIONS[kind](result, arg)
        return result


def _guards(exported: torch.export.ExportedProgram) -> list[sympy.Basic]:
    """Return the comparisons of extents that a trace has made."""
    values = (node.meta.get("val") for node in exported.graph.find_nodes(op="placeholder"))
    for value in values:
        for extent in value.shape if isinstance(value, torch.Tensor) else ():
            if isinstance(extent, torch.SymInt):
                return [guard.expr for guard in extent.node.shape_env.guards]
    return []


_FUNCTIONS = {
    **dict.fromkeys(("ToFloat", "TruncToInt", "FloorToInt", "CeilToInt"), lambda a: a),
    "Add": lambda a, b: a + b,
    "Mul": lambda a, b: a * b,
    "FloorDiv": tirx.floordiv,
    "CleanDiv": tirx.floordiv,
    "Mod": tirx.floormod,
    "PythonMod": tirx.floormod,
    "Max": tirx.max,
    "Min": tirx.min,
}
