"""Casts of widened tensors at each of their uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import tvm
from tvm import relax
from tvm.ir import Op

from ...ir.aliases import Memory
from ...ir.bindings import bindings_of, substitute, used, with_value
from ...ir.compat import dtype_of
from ...ir.dataflow import with_changed_blocks
from ...ir.dtypes import HALVES

_CAST = Op.get("relax.astype")


def source_of(value: relax.Expr) -> relax.Expr | None:
    """Return the tensor in half precision that a value widens to float32, or None."""
    is_cast = isinstance(value, relax.Call) and value.op == _CAST
    if not is_cast or dtype_of(value.ty) != "float32":
        return None
    kind = value.args[0].ty
    is_half = isinstance(kind, relax.TensorType) and kind.dtype is not None
    return value.args[0] if is_half and dtype_of(kind) in HALVES else None


@tvm.transform.module_pass(opt_level=0, name="relax_grad.RepeatCasts")
def repeat_casts(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    """Give each use of a tensor that is widened from half precision a cast of its own.

    The cast is then fused with the use. Otherwise the memory between two uses, such as those of the
    forward and of the backward pass, holds the tensor in float32.
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
        if source_of(binding.value) is not None:
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
        source = source_of(binding.value)
        if source is not None and _is_local(binding):
            casts[binding.var] = source, "float32"
            continue
        yield with_value(binding, substitute(binding.value, own))
