"""The replacement of elements of tuples by the fields that a function makes the tuples of, and of
second names."""

from __future__ import annotations

import tvm
from tvm import relax

from ...ir.bindings import substitute, with_function_body, with_value, without_unused
from ...ir.compat import set_type


@tvm.transform.module_pass(opt_level=0, name="relax_grad.ResolveTuples")
def resolve_tuples(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    """Replace elements of known tuples by the fields, and variables that name another one; remove
    the unused tuples.

    TVM's ``FuseTIR`` does the same, but takes linear time in the size of the function for each
    binding that it removes.
    """
    functions = {
        variable: _resolved(function) if isinstance(function, relax.Function) else function
        for variable, function in mod.functions_items()
    }
    return tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


def _resolved(function: relax.Function) -> relax.Function:
    tuples: dict[relax.Var, list[relax.Expr]] = {}
    known: dict[relax.Var, relax.Expr] = {}
    blocks = []
    for block in function.body.blocks[:]:
        bindings = []
        for binding in block.bindings[:]:
            value = binding.value
            if not isinstance(binding, relax.VarBinding) or isinstance(value, relax.If):
                bindings.append(binding)
                continue
            new = substitute(value, known)
            if isinstance(new, relax.Call) and not new.same_as(value):
                set_type(new, value.ty)  # a tuple already has its type
            if isinstance(new, relax.Tuple):
                tuples[binding.var] = list(new.fields)
            elif isinstance(new, relax.TupleGetItem) and new.tuple_value in tuples:
                new = tuples[new.tuple_value][new.index]
            # The variables that a block returns stay.
            if isinstance(binding.var, relax.DataflowVar) and isinstance(new, relax.Var):
                known[binding.var] = new
                continue
            bindings.append(with_value(binding, new))
        blocks.append(type(block)(bindings, block.span))
    if not known:
        return function
    body = relax.SeqExpr(blocks, function.body.body)
    return without_unused(with_function_body(function, body))
