"""The functions of a training step: differentiation, gradients of several batches, and the update of an optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax
from tvm.relax import op

from ..autodiff.gradient import Gradient, add_adjoint
from ..ir.compat import dtype_of
from ..ir.inlining import write_out_calls
from ..ir.module import copy_with_new_vars, referred_to, unused, with_functions
from ..ir.remat import REMAT, as_attribute
from ._optimizer import Optimizer, Update
from ._source import Source
from ._tensors import computed_in, shape_of
from ._totals import count_of_invalid, invalid, sum_of_squares, total_over_workers

#: Dynamic loss scaling as in ``torch.amp.GradScaler``: the initial scale, its factors, and the steps before it grows.
_FIRST_SCALE, _GROWTH, _BACKOFF, _INTERVAL = 2.0**16, 2.0, 0.5, 2000

#: The optimizer's state of dynamic loss scaling. A step that is not finite changes it.
SCALE_SLOTS = ("loss_scale", "good_steps")

#: The largest denominator that PyTorch adds to the norm of the gradients.
_NORM_EPS = 1e-6


@dataclass(frozen=True)
class Settings:
    """The arguments of :func:`train_step` behind the optimizer."""

    accumulate: int
    clip_norm: float | None
    clip_value: float | None
    loss_scale: float | str | None
    ema: float | None
    skip_nonfinite: bool
    outputs: bool
    remat: str | int | Callable | None

    @property
    def is_dynamic(self) -> bool:
        return self.loss_scale == "dynamic"

    @property
    def skips(self) -> bool:
        return self.skip_nonfinite or self.is_dynamic


@dataclass(frozen=True)
class Group:
    """Parameters with the same optimizer."""

    optimizer: Optimizer
    lr: str
    weight_decay: str
    names: list[str]

    @property
    def hyperparameters(self) -> dict[str, float]:
        decay = self.optimizer.weight_decay
        return {
            self.lr: float(self.optimizer.lr),
            **({self.weight_decay: float(decay)} if decay else {}),
        }


#: Adds the adjoint of a source's function: ``(source, variables, name, cotangent) -> module``. It returns
#: ``(result, gradients, own loss)``; ``cotangent`` is the name of a last parameter, or None.
Differentiate = Callable[[Source, list[relax.Var], str, "str | None"], tvm.IRModule]


class Build:
    """The construction of the functions of a step.

    Parameters
    ----------
    differentiate : Differentiate or None
        Differentiates the loss, with the own loss of a worker as a further metric; by default ``Gradient`` does.
    shards : int
        The number of workers among which the optimizer's state is divided. Its tensors are then vectors: a worker's part of the
        elements, with zeros behind the last ones.
    divided : Collection[str]
        The parameters of which each worker has a part. The function takes the parts. Norms are those of all parts.

    Attributes
    ----------
    hyperparameters : dict[str, float]
        The scalars that a step takes, with their defaults.
    slots : dict[str, relax.TensorType]
        The types of the optimizer's state.
    fills : dict[str, float]
        The first values of its elements.
    metrics, outputs : tuple[str, ...]
        The scalars and the outputs of the model that a step returns.
    """

    def __init__(
        self,
        source: Source,
        groups: list[Group],
        settings: Settings,
        differentiate: Differentiate | None = None,
        shards: int = 1,
        divided: Collection[str] = (),
    ):
        self.source, self.groups, self.settings = source, groups, settings
        self._differentiate, self._shards = differentiate, shards
        self._divided = frozenset(divided)
        function = source.function
        self.types = {name: function.params[at].ty for name, at in source.params.items()}
        self.hyperparameters = {k: v for each in groups for k, v in each.hyperparameters.items()}
        self.fills: dict[str, float] = {}
        self.slots = self._slots()
        self.metrics = (
            *(() if differentiate is None else ("own_loss",)),
            *(("grad_norm",) if settings.clip_norm is not None else ()),
            *(("applied",) if settings.skips else ()),
            *(("loss_scale",) if settings.is_dynamic else ()),
        )
        self.outputs = tuple(source.outputs) if settings.outputs else ()

    def _slots(self) -> dict[str, relax.TensorType]:
        """Return the types of the optimizer's state, and note the first values."""
        found = {"step": relax.TensorType((), "int64")}
        self.fills["step"] = 0
        if self.settings.is_dynamic:
            found["loss_scale"] = relax.TensorType((), "float32")
            found["good_steps"] = relax.TensorType((), "int64")
            self.fills.update(loss_scale=_FIRST_SCALE, good_steps=0)
        for group in self.groups:
            for name in group.names:
                kind = self.types[name]
                whole = relax.TensorType(kind.shape, computed_in(kind))
                group.optimizer.check_param(name, shape_of(kind))
                self._check_shards(group.optimizer, name)
                more = {
                    **group.optimizer.slots(),
                    **({"master": 0.0} if computed_in(kind) != dtype_of(kind) else {}),
                    **({"ema": 0.0} if self.settings.ema is not None else {}),
                    **({"gradient": 0.0} if self.settings.accumulate > 1 else {}),
                }
                for slot, value in more.items():
                    is_whole = self._shards == 1 or slot == "gradient"
                    found[f"{slot}/{name}"] = whole if is_whole else self._part_of(whole)
                    self.fills[f"{slot}/{name}"] = value
        return found

    def _check_shards(self, optimizer: Optimizer, name: str) -> None:
        if name in self._divided and not optimizer.is_elementwise:
            raise ValueError(
                f"{name} cannot be divided among workers with {type(optimizer).__name__}, because the update of an element depends on "
                "others; use another optimizer, or leave the parameter whole"
            )
        if self._shards > 1 and not optimizer.is_elementwise:
            raise ValueError(
                f"the state of {type(optimizer).__name__} cannot be divided among workers, because the update of an element of "
                f"{name} depends on others; use another optimizer, or leave the state whole"
            )

    def _part_of(self, kind: relax.TensorType) -> relax.TensorType:
        """Return the type of a worker's part of a tensor."""
        count = math.prod(shape_of(kind))
        return relax.TensorType((-(-count // self._shards),), dtype_of(kind))

    def _own_part(self, emit, value: relax.Expr) -> relax.Expr:
        """Return the worker's part of a tensor."""
        count = math.prod(shape_of(value.ty))
        padding = int(self._part_of(value.ty).shape.values[0]) * self._shards - count
        flat = emit(op.reshape(value, (count,)))
        if padding:
            zeros = relax.const(np.zeros(padding, dtype_of(value.ty)))
            flat = emit(op.concat([flat, zeros], 0))
        return emit(op.distributed.redistribute_replica_to_shard(flat, self._shards, 0))

    def _whole(self, emit, part: relax.Expr, kind: relax.TensorType) -> relax.Expr:
        """Return the tensor whose parts the workers have."""
        flat = emit(op.ccl.allgather(part, self._shards, False))
        count = math.prod(shape_of(kind))
        if int(flat.ty.shape.values[0]) > count:
            flat = emit(op.strided_slice(flat, [0], [0], [count]))
        return emit(op.reshape(flat, kind.shape))

    def module(self) -> tvm.IRModule:
        """Return the module of the source with the function ``step``, and ``accumulate`` where it is needed."""
        module, adjoint = self._differentiated()
        functions = {"step": self._function(module, adjoint, updates=True)}
        if self.settings.accumulate > 1:
            functions["accumulate"] = self._function(module, adjoint, updates=False)
        if self.settings.remat is not None:
            mark = as_attribute(self.settings.remat)
            functions = {name: each.with_attr(REMAT, mark) for name, each in functions.items()}
        found = with_functions(self.source.module, functions, without=self._unneeded())
        return _with_called(found, module)

    def _unneeded(self) -> list[str]:
        """Return the functions of the model that neither the step calls nor prediction."""
        reached = relax.transform.DeadCodeElimination(self._others())
        names = {variable.name_hint for variable in self.source.module.get_global_vars()}
        left = {variable.name_hint for variable in reached(self.source.module).get_global_vars()}
        return sorted(names - left)

    def _others(self) -> list[str]:
        """Return the functions that stay: that for prediction, or all but the loss of a module without one."""
        if self.source.forward:
            return [self.source.forward.name]
        names = [variable.name_hint for variable in self.source.module.get_global_vars()]
        return [name for name in names if name != self.source.name]

    def _differentiated(self) -> tuple[tvm.IRModule, relax.GlobalVar]:
        source = self.source
        function = source.function
        variables = [function.params[at] for at in source.params.values()]
        taken = {param.name for param in function.params}
        scaled = unused("loss_scale", taken) if self.settings.loss_scale is not None else False
        names = {variable.name_hint for variable in source.module.get_global_vars()}
        name = unused(f"{source.name}_adjoint", names)
        if self._differentiate is not None:
            module = self._differentiate(source, variables, name, scaled or None)
            return module, module.get_global_var(name)
        gradient = Gradient(
            source.name, variables, source.loss if source.loss else 0, cotangents=scaled
        )
        module = add_adjoint(source.module, gradient, name)
        return module, module.get_global_var(name)

    def _function(self, module: tvm.IRModule, adjoint, updates: bool) -> relax.Function:
        source = self.source
        function = source.function

        def variable(name, at):
            return relax.Var(name, function.params[at].ty)

        def group(name, places):
            return relax.Var(
                name, relax.TupleType([function.params[at].ty for at in places.values()])
            )

        batch = [variable(name, at) for name, at in source.batch.items()]
        scalars = {
            name: relax.Var(_identifier(name), relax.TensorType((), "float64"))
            for name in self.hyperparameters
        }
        seed = relax.Var("seed", relax.TensorType((), "int64"))
        groups = [group(name, getattr(source, name)) for name in ("params", "frozen", "states")]
        state = relax.Var("optimizer_state", relax.TupleType(list(self.slots.values())))
        params = [*batch, *scalars.values(), seed, *groups, state]
        bb = relax.BlockBuilder(module)
        name = "step" if updates else "accumulate"
        with bb.function(unused(name, {v.name_hint for v in module.get_global_vars()}), params):
            fields = [
                {key: bb.emit(relax.TupleGetItem(each, i)) for i, key in enumerate(places)}
                for each, places in zip(
                    [*groups, state],
                    [source.params, source.frozen, source.states, self.slots],
                    strict=True,
                )
            ]
            arguments: list = [None] * len(function.params)
            for at, value in zip(source.batch.values(), batch, strict=True):
                arguments[at] = value
            if source.seed is not None:
                arguments[source.seed] = seed
            for places, values in zip(
                (source.params, source.frozen, source.states), fields, strict=False
            ):
                for key, at in places.items():
                    arguments[at] = values[key]
            result = self._body(bb, adjoint, arguments, fields, scalars, updates)
            bb.emit_func_output(result)
        callee = module[adjoint.name_hint]
        whole = write_out_calls(bb.finalize()[_last(bb, name)], {adjoint: callee})
        return copy_with_new_vars(whole).with_attr("global_symbol", name)

    def _body(self, bb, adjoint, arguments, fields, scalars, updates) -> relax.Expr:
        settings, source = self.settings, self.source
        params, _, states, slots = fields
        emit = bb.emit
        scale = None
        if settings.loss_scale is not None:
            dtype = dtype_of(_at(source.function.ret_ty, source.loss))
            if settings.is_dynamic:
                scale = emit(op.astype(slots["loss_scale"], dtype))
            else:
                scale = relax.const(float(settings.loss_scale), dtype)
            shape = _at(source.function.ret_ty, source.loss).shape
            if len(shape):
                scale = emit(op.full(shape, scale, dtype))
            arguments = [*arguments, scale]
        both = emit(relax.Call(adjoint, arguments))
        result = emit(relax.TupleGetItem(both, 0))
        gradients = emit(relax.TupleGetItem(both, 1))
        loss = _field(emit, result, source.loss)
        outputs = [_field(emit, result, source.outputs[name]) for name in self.outputs]
        new_states = {name: _field(emit, result, path) for name, path in source.new_states.items()}
        found = {
            name: emit(
                op.astype(emit(relax.TupleGetItem(gradients, i)), computed_in(self.types[name]))
            )
            for i, name in enumerate(source.params)
        }
        found = self._scaled(emit, found, slots)
        if settings.accumulate > 1:
            found = {
                name: emit(op.add(slots[f"gradient/{name}"], each)) for name, each in found.items()
            }
        if updates:
            metrics, params, states, slots = self._updated(
                emit, loss, found, params, states, new_states, slots, scalars
            )
        else:
            metrics, states, slots = self._summed(emit, loss, found, states, new_states, slots)
        if self._differentiate is not None:
            own = emit(op.astype(emit(relax.TupleGetItem(both, 2)), "float32"))
            metrics = [emit(op.reshape(own, ())) if own.ty.ndim else own, *metrics]
        groups = [metrics, outputs, params.values(), states.values(), slots.values()]
        return relax.Tuple([loss, *(relax.Tuple(list(each)) for each in groups)])

    def _summed(self, emit, loss, sums, states, new_states, slots):
        """Return the metrics, and the new states and slots of a batch whose gradient is only added to the sums."""
        settings = self.settings
        metrics = {"grad_norm": relax.const(0.0, "float32")}
        new_slots = {**slots, **{f"gradient/{name}": each for name, each in sums.items()}}
        if settings.skips:
            is_finite = self._is_finite(emit, loss, sums)
            keep = _selection(emit, is_finite)
            new_states, new_slots = keep(new_states, states), keep(new_slots, slots)
            metrics["applied"] = emit(op.astype(is_finite, "float32"))
        if settings.is_dynamic:
            # Steps without overflow count when they update.
            new_slots.update(_next_scale(emit, is_finite, slots, counts=False))
            metrics["loss_scale"] = slots["loss_scale"]
        found = [metrics[name] for name in self.metrics if name != "own_loss"]
        return found, new_states, new_slots

    def _scaled(self, emit, gradients, slots) -> dict[str, relax.Expr]:
        """Return the share of the gradients in the mean of several batches, without the scale of the loss."""
        settings = self.settings
        if settings.is_dynamic:
            scale = op.divide(
                relax.const(1.0 / settings.accumulate, "float32"), slots["loss_scale"]
            )
            scale = emit(scale)
        else:
            factor = 1.0 / (settings.accumulate * float(settings.loss_scale or 1.0))
            if factor == 1.0:
                return gradients
            return {
                name: emit(op.multiply(each, relax.const(factor, dtype_of(each.ty))))
                for name, each in gradients.items()
            }
        return {
            name: emit(op.multiply(each, op.astype(scale, dtype_of(each.ty))))
            for name, each in gradients.items()
        }

    def _updated(self, emit, loss, gradients, params, states, new_states, slots, scalars):
        """Return the metrics, and the new parameters, states and slots."""
        settings, metrics = self.settings, {}
        # Clipped, an infinite gradient is finite.
        is_finite = self._is_finite(emit, loss, gradients) if settings.skips else None
        if settings.clip_value is not None:
            bound = float(settings.clip_value)
            gradients = {
                name: emit(op.clip(each, -bound, bound)) for name, each in gradients.items()
            }
        if settings.clip_norm is not None:
            gradients, metrics["grad_norm"] = self._clipped(emit, gradients)
        new_slots = dict(slots)
        new_slots["step"] = emit(op.add(slots["step"], relax.const(1, "int64")))
        step = emit(op.astype(new_slots["step"], "float64"))
        new_params = {}
        for group in self.groups:
            shared = {}
            for name in group.names:
                new_params[name], changed = self._one(
                    emit, group, name, params[name], gradients[name], slots, scalars, step, shared
                )
                new_slots.update(changed)
        new_params = {name: new_params[name] for name in params}
        if settings.accumulate > 1:
            for name in params:
                key = f"gradient/{name}"
                new_slots[key] = emit(op.zeros_like(slots[key]))
        if settings.skips:
            keep = _selection(emit, is_finite)
            new_params, new_states = keep(new_params, params), keep(new_states, states)
            new_slots = keep(new_slots, slots)
            metrics["applied"] = emit(op.astype(is_finite, "float32"))
        if settings.is_dynamic:
            new_slots.update(_next_scale(emit, is_finite, slots))
            metrics["loss_scale"] = slots["loss_scale"]
        found = [metrics[name] for name in self.metrics if name != "own_loss"]
        return found, new_params, new_states, new_slots

    def _one(self, emit, group, name, param, gradient, slots, scalars, step, shared):
        """Return a new parameter and its new slots."""
        kind = self.types[name]
        dtype = computed_in(kind)
        is_half = dtype != dtype_of(kind)
        own = {slot: slots[f"{slot}/{name}"] for slot in group.optimizer.slots()}
        if group.optimizer.maximize:
            gradient = emit(op.negative(gradient))
        decay = scalars.get(group.weight_decay, relax.const(0.0, "float64"))
        old = slots[f"master/{name}"] if is_half else param
        if self._shards > 1:
            gradient = self._own_part(emit, gradient)
            old = old if is_half else self._own_part(emit, param)
        given = Update(
            emit,
            dtype,
            name,
            old,
            gradient,
            own,
            scalars[group.lr],
            decay,
            step,
            shared,
        )
        new, changed = group.optimizer.update(given)
        changed = {f"{slot}/{name}": value for slot, value in changed.items()}
        if self.settings.ema is not None:
            changed[f"ema/{name}"] = given.mixed(
                slots[f"ema/{name}"], new, float(self.settings.ema)
            )
        if is_half:
            changed[f"master/{name}"] = new
            new = emit(op.astype(new, dtype_of(kind)))
        return new if self._shards == 1 else self._whole(emit, new, kind), changed

    def _clipped(self, emit, gradients):
        """Return gradients whose norm is at most ``clip_norm``, and their norm before."""
        norm = emit(op.sqrt(total_over_workers(emit, gradients, self._divided, sum_of_squares)))
        dtype = dtype_of(norm.ty)
        bound = relax.const(float(self.settings.clip_norm), dtype)
        ratio = op.divide(bound, op.add(norm, relax.const(_NORM_EPS, dtype)))
        factor = emit(op.minimum(ratio, relax.const(1.0, dtype)))
        found = {
            name: emit(op.multiply(each, op.astype(factor, dtype_of(each.ty))))
            for name, each in gradients.items()
        }
        return found, emit(op.astype(norm, "float32"))

    def _is_finite(self, emit, loss, gradients) -> relax.Expr:
        """Return whether the loss and all gradients are finite."""
        count = emit(op.sum(invalid(loss)))
        if gradients:
            more = total_over_workers(emit, gradients, self._divided, count_of_invalid)
            count = emit(op.add(count, more))
        return emit(op.equal(count, relax.const(0.0, "float32")))


def _with_called(module: tvm.IRModule, other: tvm.IRModule) -> tvm.IRModule:
    """Return a module with the functions of another one that its functions call, such as those of branches."""
    functions = dict(module.functions_items())
    known = {variable.name_hint for variable in functions}
    available = {variable.name_hint: (variable, each) for variable, each in other.functions_items()}
    waiting = list(functions.values())
    while waiting:
        names = {variable.name_hint for variable in referred_to(waiting)} - known
        known |= names
        found = [available[name] for name in sorted(names) if name in available]
        functions.update(found)
        waiting = [function for _, function in found]
    return tvm.IRModule(functions, attrs=module.attrs, global_infos=module.global_infos)


def _selection(emit, condition):
    def keep(new, old):
        return {
            name: each if each.same_as(old[name]) else emit(op.where(condition, each, old[name]))
            for name, each in new.items()
        }

    return keep


def _next_scale(emit, is_finite, slots, counts: bool = True) -> dict[str, relax.Expr]:
    """Return the new scale of the loss, and the new count of steps without overflow, in which this one may count."""
    scale, good = slots["loss_scale"], slots["good_steps"]
    smaller = op.multiply(scale, relax.const(_BACKOFF, "float32"))
    zero = relax.const(0, "int64")
    if not counts:
        return {
            "loss_scale": emit(op.where(is_finite, scale, smaller)),
            "good_steps": emit(op.where(is_finite, good, zero)),
        }
    count = emit(op.add(good, relax.const(1, "int64")))
    grows = emit(op.equal(count, relax.const(_INTERVAL, "int64")))
    grown = op.where(grows, op.multiply(scale, relax.const(_GROWTH, "float32")), scale)
    return {
        "loss_scale": emit(op.where(is_finite, grown, smaller)),
        "good_steps": emit(op.where(op.logical_and(is_finite, op.logical_not(grows)), count, zero)),
    }


def _field(emit, value, path):
    for i in path:
        value = emit(relax.TupleGetItem(value, i))
    return value


def _at(kind, path):
    for i in path:
        kind = kind.fields[i]
    return kind


def _last(bb, name):
    module = bb.finalize()
    return [v for v in module.get_global_vars() if v.name_hint.startswith(name)][-1]


def _identifier(name: str) -> str:
    return "".join(each if each.isalnum() else "_" for each in name)
