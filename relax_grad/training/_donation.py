"""Steps that write new parameters to the memory of the old ones."""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.relax import op

from ..ir.inlining import write_out_calls
from ..ir.module import DONATED, copy_with_new_vars, unused, with_functions
from ._slots import SCALE_SLOTS
from ._tensors import finite


def donating(step) -> tvm.IRModule:
    """Return the module of a ``TrainStep`` whose functions take the memory of parameters, states
    and optimizer state.

    The caller gives up these arguments, and uses the results in their place. If the loss is not
    finite, the results are the arguments, except a dynamic loss scale and its count of steps. These
    two have memory of their own: the caller may still reject the step.
    """
    module = step.module
    names = {variable.name_hint for variable in module.get_global_vars()}
    kept = [i for i, name in enumerate(step.optimizer_state) if name in SCALE_SLOTS]
    is_skipped = "applied" in step.metrics
    functions = {
        name: _donating(module, name, is_skipped, kept)
        for name in ("step", "accumulate")
        if name in names
    }
    return with_functions(module, functions)


def _donating(module: tvm.IRModule, name: str, is_skipped: bool, kept: list[int]) -> relax.Function:
    function = module[name]
    # ``step`` and ``accumulate`` end with these groups; their results are the last fields.
    count = len(function.params)
    donated = [[count - 4, 3], [count - 2, 4], [count - 1, 5, *kept]]
    if not is_skipped:
        function = _guarded(module, name, donated)
    return function.with_attrs({"global_symbol": name, DONATED: donated})


def _guarded(module: tvm.IRModule, name: str, donated: list[list[int]]) -> relax.Function:
    """Return a function that returns its arguments if the loss is not finite."""
    function = module[name]
    params = [relax.Var(param.name, param.ty) for param in function.params]
    # A builder of the module would return its variable, whose type may be missing.
    bb = relax.BlockBuilder()
    variable = bb.add_func(function, name)
    own = unused(name, {known.name_hint for known in module.get_global_vars()})
    with bb.function(own, params):
        result = bb.emit(relax.Call(variable, params))
        fields = [
            bb.emit(relax.TupleGetItem(result, i)) for i in range(len(function.ret_ty.fields))
        ]
        is_finite = bb.emit(finite(fields[0]))
        if is_finite.ty.ndim:
            is_finite = bb.emit(op.reshape(is_finite, ()))
        for at, i, *_ in donated:
            fields[i] = relax.Tuple(
                [
                    bb.emit(
                        op.where(
                            is_finite,
                            relax.TupleGetItem(fields[i], k),
                            relax.TupleGetItem(params[at], k),
                        )
                    )
                    for k in range(len(params[at].ty.fields))
                ]
            )
        guarded = bb.emit_func_output(relax.Tuple(fields))
    whole = copy_with_new_vars(write_out_calls(bb.finalize()[guarded], {variable: function}))
    return whole.with_attrs(dict(function.attrs.items())) if function.attrs else whole
