"""The replacement of conditions in extents, such as in ``x[:n - 1]``, by a form that TVM can
fuse."""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import relax, tirx
from tvm.ir import Call, GlobalVar, PrimType

from ...ir.compat import BufferLoad, structural_map, structural_walk
from ...ir.module import IF_THEN_ELSE, has_conditions

#: Operations that may crash the process if they run although the condition that guards them is
#: false.
_DIVISIONS = (tirx.Div, tirx.Mod, tirx.FloorDiv, tirx.FloorMod)


@tvm.transform.module_pass(opt_level=0, name="relax_grad.SelectExtents")
def select_extents(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    """Replace ``if_then_else`` of integers by ``Select``.

    FoldConstant and FuseOps mistake a condition in a type for a call of an operator, and FuseTIR
    does not compare extents with conditions. All of them accept ``Select``. The pass runs after
    legalization: the types that TVM infers for operators have conditions, and TVM cannot prove that
    a ``Select`` is equal to them.
    """
    functions = (
        function for function in mod.functions.values() if isinstance(function, relax.Function)
    )
    if not any(map(has_conditions, functions)):
        return mod
    copies: dict[relax.Expr, relax.Expr] = {}
    selected = {
        _copy(variable, copies): _selected(function, copies)
        for variable, function in mod.functions_items()
    }
    return tvm.IRModule(selected, attrs=mod.attrs, global_infos=mod.global_infos)


def _selected(function: tvm.ir.BaseFunc, copies: dict[relax.Expr, relax.Expr]) -> tvm.ir.BaseFunc:
    """Return a function with ``Select`` instead of conditions."""
    rules: list[tuple[object, Callable]] = [(Call, _selection)]
    if isinstance(function, relax.Function):
        kinds = (relax.Var, relax.DataflowVar, GlobalVar)
        rules.append((kinds, lambda variable: _copy(variable, copies)))
    return structural_map(function, rules, order="pre")


def _copy(variable: relax.Var | GlobalVar, copies: dict[relax.Expr, relax.Expr]) -> relax.Expr:
    """Return the replacement of a variable everywhere: the variable itself if its type has no
    condition."""
    if isinstance(variable.ty, PrimType):
        return variable
    if variable not in copies:
        new, kind = variable, structural_map(variable.ty, (Call, _selection), order="pre")
        if not kind.same_as(variable.ty):
            if isinstance(variable, GlobalVar):
                new = GlobalVar(variable.name_hint)
                relax.expr._update_type(new, kind)
            else:
                new = type(variable)(variable.name, kind)
        copies[variable] = copies[new] = new  # the mapping visits the copy too
    return copies[variable]


def _selection(call: Call) -> tirx.PrimExpr:
    """Return a ``Select`` for a condition, or the condition itself if one branch is unsafe to
    evaluate."""
    if not call.op.same_as(IF_THEN_ELSE) or "int" not in str(call.ty.dtype) or _is_guard(call):
        return call
    return tirx.Select(*call.args)


def _is_guard(call: Call) -> bool:
    nodes: list[tirx.PrimExpr] = []
    structural_walk(call, ((BufferLoad, *_DIVISIONS), nodes.append))
    return any(
        not (isinstance(node, _DIVISIONS) and isinstance(node.b, tirx.IntImm)) for node in nodes
    )
