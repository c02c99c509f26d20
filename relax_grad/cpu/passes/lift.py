"""The extraction of branches into functions, so that a conditional only selects a callee."""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.ir import GlobalVar

from ...ir.bindings import bindings_of
from ...ir.branches import lift_branches, only_calls
from ...ir.dataflow import in_dataflow
from ...ir.module import ModulePass


@tvm.transform.module_pass(opt_level=0, name="relax_grad.LiftBranches")
class LiftBranches(ModulePass):
    """Move the branches of conditionals into private functions.

    TVM plans the memory of a function as if each branch were taken. The process crashes if storage
    is reused that was allocated in a branch that was not taken. In addition, TVM's passes fuse only
    in dataflow blocks, and the bodies of branches become dataflow blocks.

    Functions with local functions stay as they are: TVM lifts the local functions first, or does
    not compile them.

    Examples
    --------
    >>> import tvm
    >>> from relax_grad import transform
    >>> text = '''
    ... @I.ir_module
    ... class Module:
    ...     @R.function
    ...     def main(
    ...         c: R.Tensor((), "bool"), x: R.Tensor((3,), "float32")
    ...     ) -> R.Tensor((3,), "float32"):
    ...         if c:
    ...             y = R.sin(x)
    ...         else:
    ...             y = R.cos(x)
    ...         return y
    ... '''
    >>> module = transform.LiftBranches()(tvm.script.from_source(text))
    >>> sorted(variable.name_hint for variable in module.functions)
    ['main', 'main_else', 'main_then']
    """

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        bb = relax.BlockBuilder(mod)
        for variable, function in mod.functions_items():
            if _has_branches(function):
                bb.update_func(variable, _lifted(bb, function, variable.name_hint))
        lifted = bb.get()
        return tvm.IRModule(
            dict(lifted.functions_items()), attrs=mod.attrs, global_infos=mod.global_infos
        )


def _has_branches(function: tvm.ir.BaseFunc) -> bool:
    """Tell whether a function has no local functions, and has branches that do more than call
    functions."""
    if not isinstance(function, relax.Function):
        return False
    values = [binding.value for binding in bindings_of(function.body)]
    if any(isinstance(value, relax.Function) for value in values):
        return False
    return any(
        not (only_calls(value.true_branch) and only_calls(value.false_branch))
        for value in values
        if isinstance(value, relax.If)
    )


def _lifted(bb: relax.BlockBuilder, function: relax.Function, name: str) -> relax.Function:
    plain = relax.transform.ToNonDataflow()(tvm.IRModule({GlobalVar("function"): function}))
    return in_dataflow(lift_branches(bb, plain["function"], name))
