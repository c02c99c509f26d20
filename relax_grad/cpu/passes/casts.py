"""Casts of widened tensors at each of their uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import tvm
from tvm import relax

from ...ir.aliases import Memory
from ...ir.bindings import bindings_of, substitute, used, with_value
from ...ir.dataflow import with_changed_blocks
from ..dispatch.casts import source_of_widened


@tvm.transform.module_pass(opt_level=0, name="relax_grad.RepeatCasts")
def repeat_casts(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    """Give each use of a tensor that is widened from half precision its own cast.

    The cast is then fused with the use. Otherwise the memory between two uses, such as in the
    forward and in the backward pass, holds the tensor in float32.
    """
    return with_changed_blocks(mod, _has_shared_cast, _repeater)


def _has_shared_cast(function: relax.Function) -> bool:
    widened: set[relax.Var] = set()
    shared: set[relax.Var] = set()
    for binding in bindings_of(function.body):
        for variable in set(used(binding.value)) & widened:
            if variable in shared:
                return True
            shared.add(variable)
        if source_of_widened(binding.value) is not None:
            widened.add(binding.var)
    return False


def _repeater(_function: relax.Function, memory: Memory) -> Callable:
    def changed(block: relax.DataflowBlock) -> relax.DataflowBlock:
        if memory.is_written:
            return block
        return relax.DataflowBlock(list(_repeated(block.bindings[:])))

    return changed


def _is_local(binding: relax.Binding) -> bool:
    return type(binding.var) is relax.DataflowVar and isinstance(binding, relax.VarBinding)


def _repeated(bindings: Sequence[relax.Binding]) -> Iterator[relax.Binding]:
    casts: dict[relax.Var, tuple[relax.Expr, str]] = {}
    for binding in bindings:
        shared = [variable for variable in used(binding.value) if variable in casts]
        own = {}
        for variable in dict.fromkeys(shared):
            copy = relax.DataflowVar(variable.name, variable.ty)
            yield relax.VarBinding(copy, relax.op.astype(*casts[variable]))
            own[variable] = copy
        source = source_of_widened(binding.value)
        if source is not None and _is_local(binding):
            casts[binding.var] = source, "float32"
            continue
        yield with_value(binding, substitute(binding.value, own))
