"""Extents with a condition, as those of ``x[:n - 1]``, in a form that TVM fuses functions with."""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.ir import Call, GlobalVar, PrimType

from ...ir.compat import BufferLoad
from ...ir.module import IF_THEN_ELSE, has_conditions

#: What ends the process where the condition that it stands under does not hold.
_DIVISIONS = (tirx.Div, tirx.Mod, tirx.FloorDiv, tirx.FloorMod)


@tvm.transform.module_pass(opt_level=0, name="relax_grad.SelectExtents")
def select_extents(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    """Make conditions on integers selections.

    FoldConstant and FuseOps take a condition in a type for a call of an operator, and FuseTIR does not compare
    extents that hold one. They take selections. Not before operators are legalized: what TVM infers for them holds
    conditions, and it does not know that a selection is the same.
    """
    functions = (each for each in mod.functions.values() if isinstance(each, relax.Function))
    if not any(map(has_conditions, functions)):
        return mod
    copies: dict[relax.Expr, relax.Expr] = {}
    functions = {
        _copy(variable, copies): _selected(function, copies)
        for variable, function in mod.functions_items()
    }
    return tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


def _selected(function: tvm.ir.BaseFunc, copies: dict[relax.Expr, relax.Expr]) -> tvm.ir.BaseFunc:
    """Return a function with selections."""
    rules = [(Call, _selection)]
    if isinstance(function, relax.Function):
        kinds = (relax.Var, relax.DataflowVar, GlobalVar)
        rules.append((kinds, lambda variable: _copy(variable, copies)))
    return tvm_ffi.structural_map(function, rules, order="pre")


def _copy(variable: relax.Var | GlobalVar, copies: dict[relax.Expr, relax.Expr]) -> relax.Expr:
    """Return what stands for a variable everywhere: itself, where its type has no condition."""
    if isinstance(variable.ty, PrimType):
        return variable
    if variable not in copies:
        new, kind = variable, tvm_ffi.structural_map(variable.ty, (Call, _selection), order="pre")
        if not kind.same_as(variable.ty):
            if isinstance(variable, GlobalVar):
                new = GlobalVar(variable.name_hint)
                relax.expr._update_type(new, kind)
            else:
                new = type(variable)(variable.name, kind)
        copies[variable] = copies[new] = new  # what is inside of a copy is visited too
    return copies[variable]


def _selection(call: Call):
    """Return a selection in the place of a condition, but where the condition guards what is not chosen."""
    if not call.op.same_as(IF_THEN_ELSE) or "int" not in str(call.ty.dtype) or _is_guard(call):
        return call
    return tirx.Select(*call.args)


def _is_guard(call: Call) -> bool:
    found = []
    tvm_ffi.structural_walk(call, ((BufferLoad, *_DIVISIONS), found.append))
    return any(
        not (isinstance(each, _DIVISIONS) and isinstance(each.b, tirx.IntImm)) for each in found
    )
