"""Names of parameters that compilers of other languages take."""

from __future__ import annotations

import tvm
from tvm import relax

from .bindings import with_function_body
from .module import ModulePass, identifier, unused


@tvm.transform.module_pass(opt_level=0, name="relax_grad.PlainNames")
class PlainNames(ModulePass):
    """A pass that gives each parameter of Relax functions a name that is an identifier.

    TVM takes the names of parameters over into code for GPUs. A name that begins with a digit, as
    names of a ``torch.nn.Sequential`` do, is an error of CUDA's compiler. The new name has an
    underscore before such a digit, and for each character that identifiers do not have. Parameters
    keep their order, and the parameters of a function have different names.

    Run the pass after differentiation, whose arguments may be names of parameters.

    Examples
    --------
    >>> from tvm import relax
    >>> from relax_grad.transform import PlainNames
    >>> weight = relax.Var("0.weight", relax.TensorType((3,), "float32"))
    >>> bb = relax.BlockBuilder()
    >>> with bb.function("main", [weight]):
    ...     _ = bb.emit_func_output(bb.emit(relax.op.tanh(weight)))
    >>> PlainNames()(bb.get())["main"].params[0].name
    '_0_weight'
    """

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        functions = {
            variable: _renamed(function) if isinstance(function, relax.Function) else function
            for variable, function in mod.functions_items()
        }
        return tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


def _renamed(function: relax.Function) -> relax.Function:
    """Return a function whose parameters have other names."""
    taken = {param.name for param in function.params if param.name == identifier(param.name)}
    params, new = [], {}
    for param in function.params:
        name = identifier(param.name)
        if name != param.name:
            name = unused(name, taken)
            taken.add(name)
            new[param] = relax.Var(name, param.ty)
        params.append(new.get(param, param))
    if not new:
        return function
    bound = function.bind_params(new)
    return with_function_body(function, bound.body, params)
