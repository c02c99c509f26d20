"""The functions of a training step: the differentiation of the loss, and what follows a batch."""

from __future__ import annotations

from collections.abc import Iterable

import tvm
from tvm import relax
from tvm.relax import op

from ..autodiff.gradient import Gradient, add_adjoint
from ..ir.inlining import write_out_adjoint, write_out_calls
from ..ir.module import (
    copy_with_new_vars,
    identifier,
    referred_to,
    unused,
    with_functions,
    with_only,
)
from ..ir.remat import REMAT, as_attribute
from ..ir.signature import MODEL_GROUPS
from ._recipe import Recipe
from ._scaling import cotangent, unscaled
from ._slots import GRADIENT, LOSS_SCALE, Slot
from ._source import Source
from ._tensors import Emit, computed_in, in_dtype
from ._update import Given, Passed, Values, summed, updated


def module_of(recipe: Recipe) -> tvm.IRModule:
    """Return the module of the source with the function ``step``, and ``accumulate`` where it is
    needed."""
    settings, source = recipe.settings, recipe.source
    module, adjoint = _differentiated(recipe)
    functions = {"step": _function(recipe, module, adjoint, updates=True)}
    if settings.accumulate > 1:
        functions["accumulate"] = _function(recipe, module, adjoint, updates=False)
    if settings.remat is not None:
        mark = as_attribute(settings.remat)
        functions = {name: function.with_attr(REMAT, mark) for name, function in functions.items()}
    with_steps = with_functions(source.module, functions, without=_unneeded(source))
    return _with_called(with_steps, module)


def _unneeded(source: Source) -> list[str]:
    """Return the functions of the model that neither the step calls nor prediction."""
    module = source.module
    left = set(with_only(module, _others(source)).get_global_vars())
    return sorted(v.name_hint for v in module.get_global_vars() if v not in left)


def _others(source: Source) -> list[str]:
    """Return the functions that stay: that for prediction, or all but the loss of a module without
    one."""
    if source.forward:
        return [source.forward.name]
    names = [variable.name_hint for variable in source.module.get_global_vars()]
    return [name for name in names if name != source.name]


def _differentiated(recipe: Recipe) -> tuple[tvm.IRModule, relax.GlobalVar]:
    """Return the module of the source with the adjoint of the loss."""
    source, differentiate = recipe.source, recipe.workers.differentiate
    function = source.function
    variables = [function.params[at] for at in source.signature.params.values()]
    taken = {param.name for param in function.params}
    is_scaled = recipe.settings.loss_scale is not None
    scaled = unused("loss_scale", taken) if is_scaled else None
    names = {variable.name_hint for variable in source.module.get_global_vars()}
    name = unused(f"{source.name}_adjoint", names)
    if differentiate is not None:
        module = differentiate(source, variables, name, scaled)
        return module, module.get_global_var(name)
    gradient = Gradient(
        source.name, variables, source.loss if source.loss else 0, cotangents=scaled or False
    )
    module = add_adjoint(source.module, gradient, name)
    return module, module.get_global_var(name)


def _function(
    recipe: Recipe, module: tvm.IRModule, adjoint: relax.GlobalVar, updates: bool
) -> relax.Function:
    """Return the function ``step``, or ``accumulate``, which updates no parameter."""
    types, signature = recipe.source.types, recipe.source.signature
    batch = {name: relax.Var(name, ty) for name, ty in types["batch"].items()}
    scalars = {
        name: relax.Var(identifier(name), relax.TensorType((), "float64"))
        for name in recipe.hyperparameters
    }
    seed = relax.Var("seed", relax.TensorType((), "int64"))
    kept = {group: types[group] for group in MODEL_GROUPS}
    kept["optimizer_state"] = {name: ty for name, (ty, _) in recipe.slots.items()}
    tuples = {
        group: relax.Var(group, relax.TupleType(list(fields.values())))
        for group, fields in kept.items()
    }
    bb = relax.BlockBuilder(module)
    name = "step" if updates else "accumulate"
    free_name = unused(name, {variable.name_hint for variable in module.get_global_vars()})
    with bb.function(free_name, [*batch.values(), *scalars.values(), seed, *tuples.values()]):
        groups = {
            group: {
                key: bb.emit(relax.TupleGetItem(tuples[group], i)) for i, key in enumerate(keys)
            }
            for group, keys in kept.items()
        }
        model = {key: value for group in MODEL_GROUPS for key, value in groups[group].items()}
        call = relax.Call(adjoint, signature.arguments(batch, model, seed))
        given = Given(groups["params"], groups["states"], groups["optimizer_state"], scalars)
        variable = bb.emit_func_output(_body(recipe, bb.emit, call, given, updates))
    caller, callee = bb.finalize()[variable], module[adjoint.name_hint]
    whole = None
    if recipe.workers.differentiate is None and recipe.settings.accumulate == 1:  # the only caller
        whole = write_out_adjoint(caller, adjoint, callee)
    if whole is None:
        whole = copy_with_new_vars(write_out_calls(caller, {adjoint: callee}))
    return whole.with_attr("global_symbol", name)


def _body(recipe: Recipe, emit: Emit, call: relax.Call, given: Given, updates: bool) -> relax.Expr:
    """Return the results of a step, of which a call of the adjoint computes the gradients."""
    source, scale = recipe.source, _scale(recipe, given.slots)
    if scale is not None:
        loss_type = _type_at(source.function.ret_ty, source.loss)
        call = relax.Call(call.op, [*call.args, cotangent(emit, loss_type, scale)])
    call = emit(call)
    result = emit(relax.TupleGetItem(call, 0))
    partials = emit(relax.TupleGetItem(call, 1))
    loss = _field(emit, result, source.loss)
    outputs = [_field(emit, result, source.outputs[name]) for name in recipe.outputs]
    states = {name: _field(emit, result, path) for name, path in source.new_states.items()}
    passed = Passed(loss, _gradients(recipe, emit, partials, given), states)
    results = (updated if updates else summed)(recipe, emit, given, passed)
    metrics = dict(results.metrics)
    if recipe.workers.differentiate is not None:
        own = emit(op.astype(emit(relax.TupleGetItem(call, 2)), "float32"))
        metrics["own_loss"] = emit(op.reshape(own, ())) if own.ty.ndim else own
    groups = (results.params.values(), results.states.values(), results.slots.values())
    fields = [[metrics[name] for name in recipe.metrics], outputs, *groups]
    return relax.Tuple([loss, *(relax.Tuple(list(group)) for group in fields)])


def _scale(recipe: Recipe, slots: Values) -> float | relax.Expr | None:
    """Return the factor of the loss, if there is one."""
    scale = recipe.settings.loss_scale
    return slots[LOSS_SCALE] if isinstance(scale, str) else scale


def _gradients(recipe: Recipe, emit: Emit, partials: relax.Expr, given: Given) -> Values:
    """Return the gradients, with the sums of earlier batches added to them."""
    settings, types = recipe.settings, recipe.source.types["params"]
    gradients: Values = {
        name: in_dtype(emit, relax.TupleGetItem(partials, i), computed_in(types[name]))
        for i, name in enumerate(given.params)
    }
    gradients = unscaled(emit, gradients, _scale(recipe, given.slots), settings.accumulate)
    if settings.accumulate == 1:
        return gradients
    return {
        name: emit(op.add(given.slots[str(Slot(GRADIENT, name))], gradient))
        for name, gradient in gradients.items()
    }


def _with_called(module: tvm.IRModule, other: tvm.IRModule) -> tvm.IRModule:
    """Return a module with the functions of another one that its functions call, such as
    branches."""
    functions = dict(module.functions_items())
    known = {variable.name_hint for variable in functions}
    available = {
        variable.name_hint: (variable, function) for variable, function in other.functions_items()
    }
    waiting = list(functions.values())
    while waiting:
        names = {variable.name_hint for variable in referred_to(waiting)} - known
        known |= names
        added = [available[name] for name in sorted(names) if name in available]
        functions.update(added)
        waiting = [function for _, function in added]
    return tvm.IRModule(functions, attrs=module.attrs, global_infos=module.global_infos)


def _field(emit: Emit, value: relax.Expr, path: Iterable[int]) -> relax.Expr:
    for i in path:
        value = emit(relax.TupleGetItem(value, i))
    return value


def _type_at(ty: relax.Type, path: Iterable[int]) -> relax.Type:
    for i in path:
        ty = ty.fields[i]
    return ty
