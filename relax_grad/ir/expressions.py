"""The loads and variables of expressions of TIR."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import tvm_ffi
from tvm import tirx

from .compat import BufferLoad, loaded_buffer, structural_map, structural_walk
from .module import is_buffer


def loads(expr: tirx.PrimExpr) -> list:
    """Return the loads in an expression or a statement, including loads in the indices of other
    loads."""
    nodes: list[tirx.PrimExpr] = []
    structural_walk(expr, (BufferLoad, nodes.append))
    return nodes


def variables(expr: tirx.PrimExpr) -> set[tirx.Var]:
    """Return the variables in an expression or a statement, including its buffers."""
    variables: set[tirx.Var] = set()
    structural_walk(expr, (tirx.Var, variables.add))
    return variables


def are_equal(expr: tirx.PrimExpr, other: tirx.PrimExpr) -> bool:
    """Tell whether two expressions have the same structure and buffers; TVM 0.26 ignores the
    buffers of loads."""
    return tvm_ffi.structural_equal(expr, other) and all(
        loaded_buffer(a).same_as(loaded_buffer(b))
        for a, b in zip(loads(expr), loads(other), strict=True)
    )


def substitute(expr: tirx.PrimExpr, values: Mapping[tirx.Var, tirx.PrimExpr]) -> tirx.PrimExpr:
    """Return an expression or a statement with values instead of variables, in the dtypes of
    these.

    A value must not contain variables that have values themselves: it would be replaced within.
    """
    if not values:
        return expr
    return structural_map(expr, (tirx.Var, variable_rule(values)), order="pre")


def variable_rule(values: Mapping[tirx.Var, tirx.PrimExpr]) -> Callable:
    """Return the rewrite rule that replaces variables by their values, cast to the dtype of the
    variable."""

    def replaced(var: tirx.Var) -> tirx.PrimExpr:
        value = values.get(var)
        if value is None:
            return var
        if is_buffer(var):
            return value
        dtype = str(var.ty.dtype)
        return value if str(value.ty.dtype) == dtype else tirx.Cast(dtype, value)

    return replaced
