"""What is computed of constants alone, computed while compiling."""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import relax, tirx
from tvm.ir import GlobalVar, Op

from .._aliases import kept_copies
from .._bindings import substitute, with_value
from .._compat import constant_value, dtype_of
from .._module import IS_SCHEDULED, normalized

_CALL_TIR = Op.get("relax.call_tir")

#: What is made of nothing and has more elements is made at run time.
_MOST_ELEMENTS = 1024


@tvm.transform.module_pass(opt_level=0, name="relax_grad.FoldConstants")
class FoldConstants:
    """Replace calls of tensor functions on constants by their results.

    ``relax.transform.FoldConstant`` does the same, and builds the function of each call, equal or not, on its own:
    for a network with many normalizations that takes as long as the network itself. Here they are built
    together. A result that a call writes to later is not folded, as a constant is not to be overwritten.
    """

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        functions = dict(mod.functions_items())
        kept = kept_copies(mod)
        calls = {
            variable: _constant_calls(function, functions, kept.get(variable))
            for variable, function in functions.items()
            if isinstance(function, relax.Function)
        }
        called = {call.args[0] for found in calls.values() for call in found.values()}
        if not called:
            return mod
        wanted = {
            variable: functions[variable].with_attr("global_symbol", variable.name_hint)
            for variable in called
        }
        library = tvm.tirx.build(tvm.IRModule(wanted), target="llvm")
        for variable, found in calls.items():
            if found:
                functions[variable] = _folded(functions[variable], found, library)
        return tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


def _constant_calls(
    function: relax.Function,
    functions: dict[GlobalVar, tvm.ir.BaseFunc],
    is_kept: Callable[[relax.Binding], bool] | None,
) -> dict[relax.Var, relax.Call]:
    """Return the calls that depend on constants alone, by the variables that they are bound to."""
    found: dict[relax.Var, relax.Call] = {}
    constants: set[relax.Var] = set()
    for block in function.body.blocks:
        for binding in block.bindings:
            value = binding.value
            if not isinstance(binding, relax.VarBinding) or (is_kept and is_kept(binding)):
                continue
            if constant_value(value) is not None:
                constants.add(binding.var)
            elif _is_foldable(value, functions) and all(
                argument in constants or constant_value(argument) is not None
                for argument in value.args[1].fields
            ):
                found[binding.var] = value
                constants.add(binding.var)
    return found


def _is_foldable(value: relax.Expr, functions: dict[GlobalVar, tvm.ir.BaseFunc]) -> bool:
    """Tell whether a value calls a tensor function with a result of known shape, and no kernel."""
    if not (isinstance(value, relax.Call) and value.op == _CALL_TIR and len(value.args) == 2):
        return False
    called, kind = functions[value.args[0]], value.ty
    if not isinstance(called, tirx.PrimFunc) or IS_SCHEDULED in (called.attrs or {}):
        return False
    if not isinstance(kind, relax.TensorType) or not isinstance(kind.shape, relax.ShapeExpr):
        return False
    size = 1
    for extent in kind.shape.values:
        if not isinstance(extent, tirx.IntImm):
            return False
        size *= int(extent)
    return size <= _MOST_ELEMENTS or len(value.args[1].fields) > 0


def _folded(function: relax.Function, calls: dict, library) -> relax.Function:
    """Return a function with the results of calls in their places."""
    known: dict[relax.Var, relax.Expr] = {}
    blocks = []
    for block in function.body.blocks:
        bindings = []
        for binding in block.bindings:
            value = binding.value
            if binding.var in calls:
                value = _result(substitute(value, known), binding.var.ty, library)
            elif isinstance(binding, relax.VarBinding):
                value = substitute(value, known)
            if constant_value(value) is not None:
                known[binding.var] = value
            bindings.append(binding if value is binding.value else with_value(binding, value))
        blocks.append(type(block)(bindings))
    body = normalized(function.params, relax.SeqExpr(blocks, function.body.body))
    return relax.analysis.remove_all_unused(
        relax.Function(
            function.params, body, function.ret_ty, function.is_pure, function.attrs, function.span
        )
    )


def _result(call: relax.Call, kind: relax.TensorType, library) -> relax.Expr:
    """Return the constant of a type that a call of a function of a library computes."""
    arguments = [tvm.runtime.tensor(constant_value(each)) for each in call.args[1].fields]
    shape = [int(extent) for extent in kind.shape.values]
    result = tvm.runtime.empty(shape, dtype_of(kind))
    library[call.args[0].name_hint](*arguments, result)
    return relax.const(result, dtype_of(kind))
