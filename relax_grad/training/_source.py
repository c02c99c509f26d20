"""The function that a training step differentiates, and the roles of its parameters and results."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import tvm
from tvm import relax

from .._validation import described
from ..activity import holds_floats
from ..ir.choices import Choices
from ..ir.compat import dtype_of
from ..ir.module import relax_function
from ..ir.signature import Signature
from ..transform import FuseAttention
from ._lora import Lora
from ._models import Import, OnnxImport, TorchImport
from ._precision import with_products_in


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
    signature : Signature
        The roles of its parameters.
    values : dict[str, tvm.runtime.Tensor]
        The initial values that are known.
    loss : tuple[int, ...]
        The path of the loss in the result, which may be a nested tuple.
    outputs, new_states : dict[str, tuple[int, ...]]
        The paths of the other results by their names.
    forward : Forward or None
        The function for prediction, which the step's module keeps.
    has_modes : bool
        Whether the function computes in training mode, which differs from evaluation mode, and no
        function computes the loss in evaluation mode.
    evaluation : str or None
        The function that returns the loss in evaluation mode, if it is another one. The names of
        its parameters are the names of the values and of the batch, and a seed if it has one.
    """

    module: tvm.IRModule
    name: str
    signature: Signature
    values: dict[str, tvm.runtime.Tensor]
    loss: tuple[int, ...]
    outputs: dict[str, tuple[int, ...]]
    new_states: dict[str, tuple[int, ...]]
    forward: Forward | None = None
    has_modes: bool = False
    evaluation: str | None = None

    @property
    def function(self) -> relax.Function:
        return self.module[self.name]

    @cached_property
    def types(self) -> dict[str, dict[str, relax.TensorType]]:
        """The types of the parameters by their groups, of which ``batch`` is one, and by their
        names."""
        return self.signature.types(self.function)


def source_of(
    model: object,
    func_name: str,
    wrt: Sequence[str] | str | None,
    states: Sequence[str],
    loss: Callable | None,
    targets: Mapping | None,
    dtype: str | None = None,
) -> Source:
    """Return the function that a step differentiates.

    Parameters
    ----------
    model, func_name, wrt, states, loss, targets
        As for :func:`train_step`.
    dtype : str, optional
        The half precision of products; by default the model's.
    """
    source = _of(model, func_name, wrt, states, loss, targets)
    if dtype is None:
        return source
    names = (source.name, source.evaluation, source.forward.name if source.forward else None)
    module = with_products_in(dtype, source.module, filter(None, names))
    return replace(source, module=module)


def _of(
    model: object,
    func_name: str,
    wrt: Sequence[str] | str | None,
    states: Sequence[str],
    loss: Callable | None,
    targets: Mapping | None,
) -> Source:
    if isinstance(model, Lora):
        if wrt is not None:
            raise ValueError("wrt: a model with adapters trains the parameters of the adapters")
        if isinstance(model.model, tvm.IRModule):
            if loss is not None or targets is not None:
                raise ValueError(
                    "loss and targets are for ONNX imports; the function of a module returns "
                    "the loss"
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
    if isinstance(model, OnnxImport):
        return _of_onnx(model, wrt, loss, targets)
    if isinstance(model, TorchImport):
        if loss is not None or targets is not None:
            raise ValueError(
                "loss and targets are for ONNX imports; pass them to the import: "
                "from_module(model, (x,), loss=loss, targets=(y,))"
            )
        return _of_torch(model, func_name, wrt)
    raise TypeError(
        "model must be a tvm.IRModule or a result of relax_grad.frontend.torch.from_module or "
        f"relax_grad.frontend.onnx.from_model, but it is {described(model)}{_remedy(model)}"
    )


def _remedy(model: object) -> str:
    if hasattr(model, "named_parameters"):  # a module of PyTorch
        return "; write train_step(from_module(model, (x,), loss=loss, targets=(y,)), optimizer)"
    if isinstance(model, str | os.PathLike):
        return "; import the file first, such as from_model(path) of relax_grad.frontend.onnx"
    return ""


def _of_module(
    model: tvm.IRModule,
    name: str,
    wrt: Sequence[str] | str | None,
    states: Sequence[str],
    adapted: Lora | None = None,
) -> Source:
    relax_function(model, name)  # refuses a name without a function
    # TVM's decorator makes a pass of the class.
    model = FuseAttention()(model)  # type: ignore[operator]
    function = relax_function(model, name)
    places = {param.name: i for i, param in enumerate(function.params)}
    if len(places) < len(function.params):
        raise ValueError(
            f"{name} has several parameters of the same name; a step needs different ones"
        )
    choices = Choices(name, "parameter", [(param, param) for param in places])
    states = choices.select("states", _names("states", states))
    if wrt is None:
        raise ValueError(
            f"wrt must name the parameters of {name} to train; it has {', '.join(places)}"
        )
    trained = choices.select("wrt", _names("wrt", wrt))
    _check_not_empty(trained)
    for param in trained:
        if param in states:
            raise ValueError(f"{param} is in wrt and in states")
    params = {param: at for param, at in places.items() if param in trained}
    _check_params(function, params)
    seed = places.get("seed")
    base = adapted.base if adapted is not None else {}
    frozen = {param: at for param, at in places.items() if param in base}
    others = {*trained, *states, *frozen}
    if seed is not None and ("seed" in others or not _is_seed(function.params[seed])):
        seed = None
    batch = {param: at for param, at in places.items() if param not in others and at != seed}
    is_tuple = isinstance(function.ret_ty, relax.TupleType)
    count = len(function.ret_ty.fields) if is_tuple else 1
    if count < 1 + len(states):
        raise ValueError(
            f"{name} must return the loss and {len(states)} new states, but it returns {count} "
            "values"
        )
    outputs = range(1, count - len(states))
    return Source(
        module=model,
        name=name,
        signature=Signature(
            seed, batch, params, frozen, {state: places[state] for state in states}
        ),
        values={} if adapted is None else {**adapted.params, **adapted.base},
        loss=(0,) if is_tuple else (),
        outputs={f"output{i - 1}" if len(outputs) > 1 else "output": (i,) for i in outputs},
        new_states={state: (count - len(states) + i,) for i, state in enumerate(states)},
    )


def _of_torch(model: TorchImport, name: str, wrt: Sequence[str] | str | None) -> Source:
    names = [variable.name_hint for variable in model.module.get_global_vars()]
    if name == "loss" and name not in names:
        raise ValueError(
            "the import has no loss to differentiate; give one: from_module(model, (x,), "
            "loss=torch.nn.functional.mse_loss, targets=(y,)), or let the module return it"
        )
    if name not in names:
        raise ValueError(f"the import has no function {name!r}, but {', '.join(sorted(names))}")
    signature = Signature.in_order(
        [*model.inputs, *model.targets], model.params, model.frozen, model.states, has_seed=True
    )
    count = len(model.module[name].params)
    if signature.num_params != count:
        raise ValueError(
            f"{name} has {count} parameters, but the import names {signature.num_params}"
        )
    return Source(
        module=model.module,
        name=name,
        signature=_trained(signature, wrt),
        values=_values(model),
        loss=(0,),
        outputs={output: (1, i) for i, output in enumerate(model.outputs)},
        new_states={state: (2, i) for i, state in enumerate(model.states)},
        forward=Forward("forward", tuple(_values(model))) if "forward" in names else None,
        has_modes=True,
    )


def _of_onnx(
    model: OnnxImport,
    wrt: Sequence[str] | str | None,
    loss: Callable | None,
    targets: Mapping | None,
) -> Source:
    if loss is None:
        raise ValueError(
            "loss must be given for an ONNX import, as for Imported.with_loss: "
            "train_step(imported, optimizer, loss=lambda bb, output, target: ..., "
            'targets={"target": ((8,), "int64")})'
        )
    module = model._with_losses(loss, targets)
    function = module["loss"]
    signature = Signature.of_import(
        function, model.params, model.frozen, model.states, has_seed=model.draws
    )
    first_state = 1 + len(model.outputs)
    return Source(
        module=module,
        name="loss",
        signature=_trained(signature, wrt),
        values=_values(model),
        loss=(0,),
        outputs={output: (1 + i,) for i, output in enumerate(model.outputs)},
        new_states={state: (first_state + i,) for i, state in enumerate(model.states)},
        forward=Forward("inference" if model._infers else "main", tuple(_values(model))),
        evaluation="inference_loss" if model._infers else None,
    )


def _values(model: Import) -> dict[str, tvm.runtime.Tensor]:
    """Return the last arguments of an import's functions by their names."""
    return {**model.params, **model.frozen, **model.states}


def _trained(signature: Signature, wrt: Sequence[str] | str | None) -> Signature:
    """Return the signature of an import in which the parameters of ``wrt`` are trained; by default
    all."""
    if wrt is None:
        if not signature.params:
            raise ValueError(
                "the import has no trainable parameter; print(imported.explain()) lists the "
                "tensors with the reasons. In PyTorch, module.requires_grad_(True) before "
                'from_module makes all trainable; of an ONNX file, from_model(..., trainable="*")'
            )
        return signature
    candidates = [(param, param) for param in signature.params]
    choices = Choices("the import", "trainable parameter", candidates)
    trained = choices.select("wrt", _names("wrt", wrt))
    _check_not_empty(trained)
    return signature.training(trained)


def _names(argument: str, value: Sequence[str] | str) -> list[str]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple | set | frozenset | dict) or not all(
        isinstance(name, str) for name in names
    ):
        raise TypeError(f"{argument} must be names of parameters, but it is {value!r}")
    return list(names)


def _check_not_empty(wrt: Sequence[str]) -> None:
    if not wrt:
        raise ValueError("wrt must name at least one parameter")


def _check_params(function: relax.Function, params: Mapping[str, int]) -> None:
    for name, at in params.items():
        ty = function.params[at].ty
        if not isinstance(ty, relax.TensorType) or not holds_floats(ty):
            raise TypeError(f"wrt: {name} must be a floating-point tensor, but its type is {ty}")


def _is_seed(param: relax.Var) -> bool:
    ty = param.ty
    return isinstance(ty, relax.TensorType) and ty.ndim == 0 and str(dtype_of(ty)) == "int64"
