"""Selections: both branches are evaluated, so that LLVM computes them in vectors."""

from __future__ import annotations

from dataclasses import replace

import tvm_ffi
from tvm import tirx
from tvm.ir import Call

from ...ir.compat import Analyzer, loaded_buffer, structural_map, structural_walk
from ...ir.expressions import loads
from ...ir.module import IF_THEN_ELSE
from ._functions import calls_in
from ._nest import Nest, analyzer


def selected_loads(nest: Nest) -> list:
    """Return the loads in the branches of selections that are proved in bounds.

    TVM turns a selection that reads memory into branches, and LLVM turns these into a gather.
    Values that are loaded before the selection are selected in vectors.
    """
    known = analyzer([*nest.axes, *nest.reduced])
    return [load for load in selections(nest.value) if _is_within(load, nest, known)]


def with_selections(nest: Nest) -> Nest:
    """Return a nest with selections instead of conditional expressions that read nothing out
    of bounds.

    LLVM vectorises a selection, and may not read memory before it knows that a condition holds.
    """
    if not any(call.op.same_as(IF_THEN_ELSE) for call in calls_in(nest.value)):
        return nest
    known = analyzer([*nest.axes, *nest.reduced])
    within = {load for load in nest.loads if _is_within(load, nest, known)}

    def change(call: tirx.PrimExpr) -> tirx.PrimExpr:
        if not call.op.same_as(IF_THEN_ELSE):
            return call
        condition, *branches = call.args
        is_safe = all(
            not calls_in(branch) and not _may_fail(branch) and within.issuperset(loads(branch))
            for branch in branches
        )
        return tirx.Select(condition, *branches) if is_safe else call

    return replace(nest, value=structural_map(nest.value, (Call, change), order="post"))


def _may_fail(expr: tirx.PrimExpr) -> bool:
    """Tell whether an expression divides integers by a number that may be 0."""
    nodes: list[tirx.PrimExpr] = []
    divisions = (tirx.Div, tirx.Mod, tirx.FloorDiv, tirx.FloorMod)
    structural_walk(expr, (divisions, nodes.append))
    return any(
        not isinstance(node.b, (tirx.IntImm, tirx.FloatImm)) and "int" in str(node.ty.dtype)
        for node in nodes
    )


def selections(expr: tirx.PrimExpr) -> list:
    """Return the loads in the branches of an expression's selections."""
    branch_loads: dict = {}

    def visit(select: tirx.PrimExpr) -> None:
        for branch in (select.true_value, select.false_value):
            branch_loads.update(dict.fromkeys(loads(branch)))

    structural_walk(expr, (tirx.Select, visit))
    return list(branch_loads)


def _is_within(load: tirx.PrimExpr, nest: Nest, known: Analyzer) -> bool:
    """Tell whether a load is proved in bounds, regardless of conditions."""
    (index,), (extent,) = load.indices, loaded_buffer(load).shape
    if loads(index):
        return False
    is_stored = tvm_ffi.structural_equal([index], list(nest.indices))
    if is_stored and known.can_prove_equal(extent, nest.buffer.shape[0]):
        return True
    return known.can_prove(tirx.all(index >= 0, index < extent))
