"""A form of dataflow blocks for which FuseOps is right and takes linear time.

FuseOps visits all paths from a tensor to the call that post-dominates it. In a training step these
paths are long, because most results of the forward pass are also operands of the backward pass.
FuseOps visits no path from a tensor that the dataflow block returns.

FuseOps replaces each tuple that a fused function reads by parameters for the elements. It notes the
places of all tuples before the first replacement, and replaces them in the order of their
addresses. Two elements of one tuple move the places of the later tuples, so that another parameter
may be removed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import tvm
from tvm import relax
from tvm.ir import GlobalVar, Op, PrimType

from ...ir.bindings import bindings_of, renamed, used
from ...ir.dataflow import with_changed_bindings
from ...ir.module import OPAQUE

_CALL_TIR = Op.get("relax.call_tir")

_FUSE_OPS = relax.transform.FuseOps()


@tvm.transform.module_pass(opt_level=0, name="relax_grad.ReturnOperands")
def return_operands(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    """Let dataflow blocks return the operands of opaque calls. FuseOps never fuses these operands
    with a consumer."""

    def chosen(block: relax.DataflowBlock, _outside: set[relax.Var]) -> set[relax.Var]:
        operands = {
            variable
            for binding in block.bindings[:]
            if isinstance(binding.value, relax.Call) and _is_opaque(binding.value, mod)
            for variable in used(binding.value)
        }
        return {
            binding.var
            for binding in block.bindings[:]
            if isinstance(binding.var, relax.DataflowVar) and binding.var in operands
        }

    return _with_variables(mod, chosen, relax.Var)


@tvm.transform.module_pass(opt_level=0, name="relax_grad.KeepOperands")
def keep_operands(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    """Undo :func:`return_operands`: dataflow blocks return only variables that are used outside of
    them."""

    def chosen(block: relax.DataflowBlock, outside: set[relax.Var]) -> set[relax.Var]:
        return {
            binding.var
            for binding in block.bindings[:]
            if not isinstance(binding.var, relax.DataflowVar) and binding.var not in outside
        }

    return _with_variables(mod, chosen, relax.DataflowVar)


@tvm.transform.module_pass(opt_level=0, name="relax_grad.FuseOps")
def fuse_ops(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    """Fuse operators by TVM's pass, such that no fused function reads elements of two tuples.

    The elements that would be read within such a function become results of the dataflow block,
    which TVM's pass takes as tensors.
    """
    fused = _FUSE_OPS(mod)
    while mixed := _mixed_tuples(fused, mod):

        def chosen(
            block: relax.DataflowBlock, _outside: set[relax.Var], mixed: set[relax.Var] = mixed
        ) -> set[relax.Var]:
            return {
                binding.var
                for binding in block.bindings[:]
                if isinstance(binding.var, relax.DataflowVar)
                and isinstance(binding.value, relax.TupleGetItem)
                and binding.value.tuple_value in mixed
            }

        changed = _with_variables(mod, chosen, relax.Var)
        if changed is mod:  # a block with local functions, whose variables stay
            break
        mod, fused = changed, _FUSE_OPS(changed)
    return fused


def _mixed_tuples(fused: tvm.IRModule, mod: tvm.IRModule) -> set[relax.Expr]:
    """Return the tuples of which a fused function takes several elements, if it takes elements of
    other tuples too.

    FuseOps reads the elements that it passes by new variables. A tensor that the block returns is
    no such variable.
    """
    known = {
        b.var
        for f in mod.functions.values()
        if isinstance(f, relax.Function)
        for b in bindings_of(f.body)
    }
    mixed: set[relax.Expr] = set()
    for function in fused.functions.values():
        if not isinstance(function, relax.Function):
            continue
        tuples: dict[relax.Expr, relax.Expr] = {}
        for binding in bindings_of(function.body):
            value = binding.value
            if isinstance(value, relax.TupleGetItem) and binding.var not in known:
                tuples[binding.var] = value.tuple_value
            elif isinstance(value, relax.Call) and isinstance(value.op, GlobalVar):
                read = [tuples[argument] for argument in value.args if argument in tuples]
                if len(set(read)) > 1:
                    mixed |= {tuple_value for tuple_value in read if read.count(tuple_value) > 1}
    return mixed


def _is_opaque(call: relax.Call, mod: tvm.IRModule) -> bool:
    if call.op != _CALL_TIR:
        return True
    attributes = mod[call.args[0]].attrs
    return attributes is not None and int(attributes.get("op_pattern", 0)) == OPAQUE


def _with_variables(mod: tvm.IRModule, chosen: Callable, kind: type[relax.Var]) -> tvm.IRModule:
    """Return a module in which the chosen variables of each dataflow block are replaced by
    variables of a kind.

    Parameters
    ----------
    mod : tvm.IRModule
        The module.
    chosen : Callable
        Takes a dataflow block and the variables that are used outside of it; returns the variables
        to replace.
    kind : type[relax.Var]
        The class of the new variables.
    """
    functions, is_changed = dict(mod.functions_items()), False
    for name, function in functions.items():
        if not isinstance(function, relax.Function) or (function.attrs or {}).get("Primitive"):
            continue
        names: dict[relax.Var, relax.Var] = {}
        for block, outside in _blocks(function):
            for variable in chosen(block, outside):
                # A number may be used within a shape, where it would not be replaced.
                if not isinstance(variable.ty, PrimType):
                    names[variable] = kind(variable.name, variable.ty)
        if names:
            is_changed = True
            functions[name] = with_changed_bindings(function, partial(renamed, names=names))
    if not is_changed:
        return mod
    return tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


def _blocks(function: relax.Function) -> list[tuple[relax.DataflowBlock, set[relax.Var]]]:
    """Return the dataflow blocks of a function's body, with the variables that are used outside of
    each.

    Blocks with local functions, which may capture variables, are left out.
    """
    users: dict[relax.Var, set[int]] = {}
    for i, block in enumerate(function.body.blocks):
        for binding in block.bindings[:]:
            for variable in relax.analysis.all_vars(binding.value):
                users.setdefault(variable, set()).add(i)
    for variable in relax.analysis.all_vars(function.body.body):
        users.setdefault(variable, set()).add(-1)
    blocks = []
    for i, block in enumerate(function.body.blocks):
        has_functions = any(isinstance(b.value, relax.Function) for b in block.bindings[:])
        if isinstance(block, relax.DataflowBlock) and not has_functions:
            outside = {b.var for b in block.bindings[:] if users.get(b.var, set()) - {i}}
            blocks.append((block, outside))
    return blocks
