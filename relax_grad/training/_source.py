"""The function that a training step differentiates, and the roles of its parameters and results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import tvm
from tvm import relax

from ..activity import holds_floats
from ..ir.compat import dtype_of
from ..ir.module import relax_function
from ._lora import Lora


@dataclass(frozen=True)
class Forward:
    """A function for prediction, whose last parameters are values of the model.

    Attributes
    ----------
    name : str
        The name of the function.
    values : tuple[str, ...]
        The names of its last parameters.
    """

    name: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Source:
    """A function that returns a loss.

    Attributes
    ----------
    module : tvm.IRModule
        The module.
    name : str
        The name of the function.
    seed : int or None
        The position of the seed among the parameters.
    batch, params, frozen, states : dict[str, int]
        The positions of the parameters by their names.
    values : dict[str, tvm.runtime.Tensor]
        The initial values that are known.
    loss : tuple[int, ...]
        The path of the loss in the result, which may be a nested tuple.
    outputs, new_states : dict[str, tuple[int, ...]]
        The paths of the other results by their names.
    forward : Forward or None
        The function for prediction, which the step's module keeps.
    has_modes : bool
        Whether the function computes in training mode, which differs from evaluation mode, and no function computes the loss
        in evaluation mode.
    evaluation : str or None
        The function that returns the loss in evaluation mode, if it is another one. The names of its parameters are those of the
        values and of the batch, and a seed if it has one.
    """

    module: tvm.IRModule
    name: str
    seed: int | None
    batch: dict[str, int]
    params: dict[str, int]
    frozen: dict[str, int]
    states: dict[str, int]
    values: dict[str, tvm.runtime.Tensor]
    loss: tuple[int, ...]
    outputs: dict[str, tuple[int, ...]]
    new_states: dict[str, tuple[int, ...]]
    forward: Forward | None
    has_modes: bool
    evaluation: str | None = None

    @property
    def function(self) -> relax.Function:
        return self.module[self.name]


def source_of(
    model: object,
    func_name: str,
    wrt: Sequence[str] | str | None,
    states: Sequence[str],
    loss: Callable | None,
    targets: Mapping | None,
) -> Source:
    """Return the function that a step differentiates; the arguments are those of :func:`train_step`."""
    if isinstance(model, Lora):
        if wrt is not None:
            raise ValueError(
                "wrt: the parameters of a model with adapters are those of the adapters"
            )
        if isinstance(model.model, tvm.IRModule):
            if loss is not None or targets is not None:
                raise ValueError(
                    "loss and targets are for ONNX imports; the function of a module returns the loss"
                )
            return _of_module(model.model, func_name, list(model.params), states, model)
        model = model.model
    if isinstance(model, tvm.IRModule):
        if loss is not None or targets is not None:
            raise ValueError(
                "loss and targets are for ONNX imports; the function of a module returns the loss"
            )
        return _of_module(model, func_name, wrt, states)
    if states:
        raise ValueError("states are for modules; an import has its own")
    if hasattr(model, "with_loss"):  # an ONNX import
        return _of_onnx(model, func_name, wrt, loss, targets)
    if hasattr(model, "aliases") and hasattr(model, "module"):
        if loss is not None or targets is not None:
            raise ValueError("loss and targets are for ONNX imports; pass the loss to from_module")
        return _of_torch(model, func_name, wrt)
    raise TypeError(
        "model must be a tvm.IRModule or a result of relax_grad.frontend.torch.from_module or "
        f"relax_grad.frontend.onnx.from_model, but it is {model!r}"
    )


def _of_module(model, name, wrt, states, adapted: Lora | None = None) -> Source:
    function = relax_function(model, name)
    places = {param.name: i for i, param in enumerate(function.params)}
    if len(places) < len(function.params):
        raise ValueError(
            f"{name} has several parameters of the same name; a step needs different ones"
        )
    states = _names("states", states)
    _check_known("states", states, places, name)
    if wrt is None:
        raise ValueError(
            f"wrt must name the parameters of {name} to train; it has {', '.join(places)}"
        )
    given = _names("wrt", wrt)
    _check_known("wrt", given, places, name)
    for each in given:
        if each in states:
            raise ValueError(f"{each} is in wrt and in states")
    params = {each: places[each] for each in places if each in given}
    _check_params(function, params)
    seed = places.get("seed")
    if seed is not None and (seed in params.values() or not _is_seed(function.params[seed])):
        seed = None
    kept = {each: places[each] for each in states}
    base = (
        {} if adapted is None else {each: at for each, at in places.items() if each in adapted.base}
    )
    taken = {*params.values(), *kept.values(), *base.values(), seed}
    batch = {each: at for each, at in places.items() if at not in taken}
    is_tuple = isinstance(function.ret_ty, relax.TupleType)
    count = len(function.ret_ty.fields) if is_tuple else 1
    if count < 1 + len(states):
        raise ValueError(
            f"{name} must return the loss and {len(states)} new states, but it returns {count} values"
        )
    rest = range(1, count - len(states))
    return Source(
        model,
        name,
        seed,
        batch,
        params,
        base,
        kept,
        {} if adapted is None else {**adapted.params, **adapted.base},
        (0,) if is_tuple else (),
        {f"output{i - 1}" if len(rest) > 1 else "output": (i,) for i in rest},
        {each: (count - len(states) + i,) for i, each in enumerate(states)},
        None,
        False,
    )


def _of_torch(model, name, wrt) -> Source:
    names = [variable.name_hint for variable in model.module.get_global_vars()]
    if name not in names:
        raise ValueError(
            f"the import has no function {name!r}, but {', '.join(sorted(names))}; pass a loss to from_module"
        )
    function = model.module[name]
    count = len(function.params)
    groups = [["seed"], [*model.inputs, *model.targets], model.params, model.frozen, model.states]
    places, at = [], 0
    for group in groups:
        places.append({key: at + i for i, key in enumerate(group)})
        at += len(group)
    if at != count:
        raise ValueError(f"{name} has {count} parameters, but the import names {at}")
    _, batch, params, frozen, states = places
    params, frozen = _split(wrt, params, frozen)
    return Source(
        model.module,
        name,
        0,
        batch,
        params,
        frozen,
        states,
        {**model.params, **model.frozen, **model.states},
        (0,),
        {key: (1, i) for i, key in enumerate(model.outputs)},
        {key: (2, i) for i, key in enumerate(model.states)},
        Forward("forward", _values(model)) if "forward" in names else None,
        True,
    )


def _of_onnx(model, name, wrt, loss, targets) -> Source:
    if loss is None:
        raise ValueError(
            "loss must be given for an ONNX import: loss(bb, *outputs, *targets), as for Imported.with_loss"
        )
    module = model._with_losses(loss, targets)
    function = module["loss"]
    first = 1 if model.draws else 0
    count = int(function.attrs["num_input"])
    names = [param.name for param in function.params]
    batch = {each: i for i, each in enumerate(names) if first <= i < count}
    places, at = [], count
    for group in (model.params, model.frozen, model.states):
        places.append({key: at + i for i, key in enumerate(group)})
        at += len(group)
    params, frozen = _split(wrt, *places[:2])
    return Source(
        module,
        "loss",
        0 if model.draws else None,
        batch,
        params,
        frozen,
        places[2],
        {**model.params, **model.frozen, **model.states},
        (0,),
        {key: (1 + i,) for i, key in enumerate(model.outputs)},
        {key: (1 + len(model.outputs) + i,) for i, key in enumerate(model.states)},
        Forward("inference" if model._infers else "main", _values(model)),
        False,
        "inference_loss" if model._infers else None,
    )


def _values(model) -> tuple[str, ...]:
    """Return the names of the last parameters of an import's functions."""
    return (*model.params, *model.frozen, *model.states)


def _split(wrt, params: dict[str, int], frozen: dict[str, int]) -> tuple[dict, dict]:
    """Return the parameters of which gradients are wanted, and the others."""
    if wrt is None:
        if not params:
            raise ValueError("the import has no trainable parameter")
        return params, frozen
    wanted = _names("wrt", wrt)
    _check_known("wrt", wanted, params, "the import", "trainable parameter")
    chosen = {key: at for key, at in params.items() if key in wanted}
    return chosen, {**{key: at for key, at in params.items() if key not in wanted}, **frozen}


def _names(argument: str, given) -> list[str]:
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list | tuple | set | frozenset | dict) or not all(
        isinstance(each, str) for each in names
    ):
        raise TypeError(f"{argument} must be names of parameters, but it is {given!r}")
    if len(set(names)) < len(names):
        raise ValueError(f"{argument} names a parameter twice: {', '.join(names)}")
    return list(names)


def _check_known(argument, names, known, owner: str, kind: str = "parameter") -> None:
    for each in names:
        if each not in known:
            shown = ", ".join(list(known)[:8]) + (", ..." if len(known) > 8 else "")
            raise ValueError(
                f"{argument}: {owner} has no {kind} {each!r}; it has {shown or 'none'}"
            )
    if argument == "wrt" and not names:
        raise ValueError("wrt must name at least one parameter")


def _check_params(function: relax.Function, params: Mapping[str, int]) -> None:
    for name, at in params.items():
        kind = function.params[at].ty
        if not isinstance(kind, relax.TensorType) or not holds_floats(kind):
            raise TypeError(f"wrt: {name} must be a floating-point tensor, but its type is {kind}")


def _is_seed(param: relax.Var) -> bool:
    kind = param.ty
    return isinstance(kind, relax.TensorType) and kind.ndim == 0 and str(dtype_of(kind)) == "int64"
