"""Loops of tensor functions in canonical form: from 0 in steps of 1."""

from __future__ import annotations

import tvm
from tvm import tirx

from .compat import structural_map
from .expressions import substitute
from .module import with_body, with_changed_functions


def with_canonical_loops(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return a function whose loops begin at 0 and have the step 1.

    TVM's ``s_tir.CanonicalizeLoop`` leaves the variable of such a loop unchanged in the bounds of
    the loops within it, which then run over other elements. It has nothing to do for this function.

    Parameters
    ----------
    function : tirx.PrimFunc
        The function. Loops that are bound to threads, and loops whose step is not positive, stay
        as they are.
    """
    return with_body(function, structural_map(function.body, (tirx.For, _canonical), order="post"))


def canonicalize_loops(mod: tvm.IRModule) -> tvm.IRModule:
    """Return a module whose tensor functions have canonical loops; the same module if they do."""
    return with_changed_functions(mod, tirx.PrimFunc, with_canonical_loops)


def _canonical(loop: tirx.For) -> tirx.For:
    step = _step(loop)
    is_plain = step == 1 and isinstance(loop.min, tirx.IntImm) and int(loop.min) == 0
    if is_plain or step is None or loop.thread_binding is not None:
        return loop
    old = loop.loop_var
    dtype = str(old.ty.dtype)
    var = tirx.Var(old.name, dtype)
    start, extent = _cast(loop.min, dtype), _cast(loop.extent, dtype)
    value = var * tirx.IntImm(dtype, step) + start
    extent = tirx.floordiv(extent + tirx.IntImm(dtype, step - 1), tirx.IntImm(dtype, step))
    return tirx.For(
        var,
        tirx.IntImm(dtype, 0),
        extent,
        loop.kind,
        substitute(loop.body, {old: value}),
        loop.thread_binding,
        loop.annotations,
        span=loop.span,
    )


def _step(loop: tirx.For) -> int | None:
    """Return the step of a loop, or None if it is not positive."""
    step = getattr(loop, "step", None)  # None stands for 1; TVM 0.26 has no steps
    if step is None:
        return 1
    return int(step) if isinstance(step, tirx.IntImm) and int(step) > 0 else None


def _cast(expr: tirx.PrimExpr, dtype: str) -> tirx.PrimExpr:
    if str(expr.ty.dtype) == dtype:
        return expr
    return tirx.IntImm(dtype, int(expr)) if isinstance(expr, tirx.IntImm) else expr.astype(dtype)
