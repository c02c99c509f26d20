"""Functions that take the memory of another function, before that writes to its arguments."""

from __future__ import annotations

from itertools import chain

import tvm
from tvm import relax, tirx
from tvm.ir import GlobalVar

from ...ir.bindings import bindings_of
from ...ir.module import DONATED, MEMORY, copy_with_new_vars, normalized

_STORAGE, _TENSOR = "relax.memory.alloc_storage", "relax.memory.alloc_tensor"
_KILLS = ("relax.memory.kill_tensor", "relax.memory.kill_storage")


@tvm.transform.module_pass(opt_level=0, name="relax_grad.ReserveMemory")
def reserve_memory(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    """Add a function ``NAME_memory`` for each function that writes to the memory of its arguments.

    It takes the same arguments, allocates and frees the same memory in the same order, and computes
    nothing. After it, the allocator of the virtual machine has all memory that the function needs,
    so that a lack of memory shows itself before the first argument is written.
    """
    functions = dict(mod.functions_items())
    for variable, function in mod.functions_items():
        if isinstance(function, relax.Function) and DONATED in (function.attrs or {}):
            name = variable.name_hint + MEMORY
            functions[GlobalVar(name)] = _allocations(function, name)
    if len(functions) == len(mod.functions_items()):
        return mod
    return tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


def _allocations(function: relax.Function, name: str) -> relax.Function:
    function = copy_with_new_vars(function)
    # Extents that the function finds in values are not known before it runs.
    extents = set(
        chain.from_iterable(
            relax.analysis.definable_tir_vars_in_type(param.ty) for param in function.params
        )
    )
    kept: list[relax.Binding] = []
    made: set[relax.Var] = set()
    for binding in bindings_of(function.body):
        value = binding.value
        operator = getattr(getattr(value, "op", None), "name", None)
        if operator in _KILLS:
            is_kept = value.args[0] in made
        elif operator == _TENSOR:
            is_kept = value.args[0] in made and _is_known(value.args[2], extents)
        else:
            is_kept = operator == _STORAGE and _is_known(value.args[0], extents)
        if is_kept:
            kept.append(binding)
            if operator not in _KILLS:
                made.add(binding.var)
    result = relax.BlockBuilder().normalize(relax.Tuple([]))
    body = normalized(function.params, relax.SeqExpr([relax.BindingBlock(kept)], result))
    made_function = relax.Function(
        function.params, body, result.ty, function.is_pure, function.attrs
    )
    return made_function.without_attr(DONATED).with_attr("global_symbol", name)


def _is_known(shape: relax.ShapeExpr, extents: set[tirx.Var]) -> bool:
    return all(
        variable in extents
        for extent in shape.values
        for variable in tirx.analysis.undefined_vars(extent)
    )
