"""Remainders and quotients that TVM's LowerIntrin does not lower at two places of a function."""

from __future__ import annotations

import tvm_ffi
from tvm import tirx

from .compat import structural_map, structural_walk
from .expressions import loads

_KINDS = (tirx.FloorMod, tirx.FloorDiv)


def with_truncated_remainders(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return a function without a rounded-down remainder or quotient that occurs twice.

    ``LowerIntrin`` binds a variable for a dividend that may be negative. For an equal expression at
    another place, such as an index within an index, it binds the same variable again and fails:
    "conflicts with previous binding". Here truncated divisions compute such expressions.

    Parameters
    ----------
    function : tirx.PrimFunc
        The function; the same one is returned if it has no such expression.
    """
    found: list[tirx.PrimExpr] = []
    structural_walk(function.body, (_KINDS, found.append))
    places: dict[int, int] = {}
    for node in filter(_is_lowered_with_a_binding, found):
        # A quotient and a remainder of the same numbers bind the same variables.
        key = tvm_ffi.structural_hash(tirx.FloorMod(node.a, node.b), map_free_vars=False)
        places[key] = places.get(key, 0) + 1
    repeated = {key for key, count in places.items() if count > 1}
    if not repeated:
        return function

    def change(node: tirx.PrimExpr) -> tirx.PrimExpr:
        if not _is_lowered_with_a_binding(node):
            return node
        key = tvm_ffi.structural_hash(tirx.FloorMod(node.a, node.b), map_free_vars=False)
        return _truncated(node) if key in repeated else node

    body = structural_map(function.body, (_KINDS, change), order="post")
    made = tirx.PrimFunc(function.params, body, function.ret_type, function.attrs, function.span)
    return with_truncated_remainders(made)  # those around a changed one


def _is_lowered_with_a_binding(node: tirx.PrimExpr) -> bool:
    """Tell whether the divisor is a symbolic extent: for others TVM proves more."""
    is_index = str(node.ty.dtype) in ("int32", "int64")
    return is_index and not isinstance(node.b, tirx.IntImm) and not loads(node.b)


def _truncated(node: tirx.PrimExpr) -> tirx.PrimExpr:
    a, b = tirx.Cast("int64", node.a), tirx.Cast("int64", node.b)
    remainder = tirx.truncmod(tirx.truncmod(a, b) + b, b)
    value = remainder if isinstance(node, tirx.FloorMod) else tirx.truncdiv(a - remainder, b)
    return tirx.Cast(str(node.ty.dtype), value)
