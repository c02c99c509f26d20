"""Symbolic extents of torch.export as expressions of TVM."""

from __future__ import annotations

from collections.abc import Mapping

import sympy
import torch
from tvm import tirx

from ._converters import Refused


class Symbols:
    """The symbolic extents of one function.

    Parameters
    ----------
    names : Mapping[str, str]
        The names of symbols, where they differ from those that torch.export gives them.
    """

    def __init__(self, names: Mapping[str, str]):
        self._names = names
        self._variables: dict[str, tirx.Var] = {}

    def extents(self, shape) -> list[int | tirx.Expr]:
        """Return the extents of a shape."""
        return [self.expression(extent) for extent in shape]

    def expression(self, value) -> int | tirx.Expr:
        """Return an integer of torch.export as a number or as an expression of int64."""
        if isinstance(value, torch.SymInt):
            value = value.node.expr
        if isinstance(value, (int, sympy.Integer)):
            return int(value)
        return self._of(value)

    def _variable(self, symbol: sympy.Symbol) -> tirx.Var:
        name = str(symbol)
        if name.startswith(("u", "zuf")):
            raise Refused(
                "its shape depends on values, which Relax differentiates for fixed shapes only"
            )
        if name not in self._variables:
            self._variables[name] = tirx.Var(self._names.get(name, name), "int64")
        return self._variables[name]

    def _of(self, value) -> tirx.Expr:
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
