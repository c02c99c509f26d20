"""The removal of tensor functions without a call."""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.ir import GlobalVar


@tvm.transform.module_pass(opt_level=0, name="relax_grad.RemoveUnused")
def remove_unused(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    """Remove the tensor functions that no function refers to, such as those whose calls write in
    place or became views.

    Functions with a global symbol stay: a user may call them by name.
    """
    used: set[GlobalVar] = set()
    candidates: dict[GlobalVar, tirx.PrimFunc] = {}
    others: list[tirx.PrimFunc] = []
    for variable, function in mod.functions_items():
        if isinstance(function, relax.Function):
            used.update(relax.analysis.all_global_vars(function))
        elif isinstance(function, tirx.PrimFunc):
            others.append(function)
            if function.attrs is None or "global_symbol" not in function.attrs:
                candidates[variable] = function
    unused = candidates.keys() - used
    if not unused:
        return mod
    for function in others:
        tvm_ffi.structural_walk(function.body, (GlobalVar, used.add))
    functions = {
        variable: function
        for variable, function in mod.functions_items()
        if variable in used or variable not in unused
    }
    return tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)
