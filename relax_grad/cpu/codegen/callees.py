"""Other callees and other names of tensor functions."""

from __future__ import annotations

from collections.abc import Mapping

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.ir import GlobalVar, Op

from ...ir.bindings import with_function_body, with_value
from ...ir.compat import set_type


def with_callees(function: relax.Function, named: Mapping[GlobalVar, relax.Expr]) -> relax.Function:
    """Return a function in which other expressions replace the callees."""
    return with_function_body(function, _calling(function.body, named))


def _calling(expr: relax.Expr, named: Mapping[GlobalVar, relax.Expr]) -> relax.Expr:
    if isinstance(expr, relax.Var):  # most expressions are
        return expr
    if isinstance(expr, GlobalVar):
        return named.get(expr, expr)
    if isinstance(expr, relax.SeqExpr):
        new = relax.SeqExpr(
            [_block(block, named) for block in expr.blocks], _calling(expr.body, named)
        )
    elif isinstance(expr, relax.If):
        branches = _calling(expr.true_branch, named), _calling(expr.false_branch, named)
        new = relax.If(expr.cond, *branches, expr.span)
    elif isinstance(expr, relax.Call):
        op, before = expr.op, list(expr.args)
        callee = op if isinstance(op, Op) else _calling(op, named)
        args = [_calling(argument, named) for argument in before]
        if callee is op and all(new is old for new, old in zip(args, before, strict=True)):
            return expr
        new = relax.Call(callee, args, expr.attrs, expr.ty_args, expr.span)
    elif isinstance(expr, relax.Tuple):
        before = list(expr.fields)
        fields = [_calling(field, named) for field in before]
        if all(new is old for new, old in zip(fields, before, strict=True)):
            return expr
        new = relax.Tuple(fields, expr.span)
    else:
        return expr
    set_type(new, expr.ty)
    return new


def _block(block: relax.BindingBlock, named: Mapping[GlobalVar, relax.Expr]) -> relax.BindingBlock:
    bindings = [with_value(binding, _calling(binding.value, named)) for binding in block.bindings]
    return type(block)(bindings, block.span)


@tvm.transform.module_pass(opt_level=0, name="relax_grad.PrefixSymbols")
class PrefixSymbols:
    """Put a prefix before the names of tensor functions.

    A library has one function of each name, so that programs in one library need different
    prefixes.

    Parameters
    ----------
    prefix : str
        The prefix. Names that have it stay.
    """

    def __init__(self, prefix: str):
        self._prefix = prefix

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        renamed = {}
        for variable, function in mod.functions_items():
            name = variable.name_hint
            if isinstance(function, tirx.PrimFunc) and not name.startswith(self._prefix):
                renamed[variable] = GlobalVar(self._prefix + name)
                set_type(renamed[variable], variable.ty)
        functions = {
            renamed.get(variable, variable): self._changed(variable, function, renamed)
            for variable, function in mod.functions_items()
        }
        return tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)

    def _changed(
        self,
        variable: GlobalVar,
        function: tvm.ir.BaseFunc,
        renamed: Mapping[GlobalVar, GlobalVar],
    ) -> tvm.ir.BaseFunc:
        if isinstance(function, relax.Function):
            return with_callees(function, renamed)
        if not isinstance(function, tirx.PrimFunc):
            return function
        body = tvm_ffi.structural_map(
            function.body, (GlobalVar, lambda callee: renamed.get(callee, callee))
        )
        function = function.with_body(body) if not body.same_as(function.body) else function
        if variable in renamed and "global_symbol" in (function.attrs or {}):
            return function.with_attr("global_symbol", renamed[variable].name_hint)
        return function
