"""The functions of a training step: differentiation, gradients of several batches, and the update
of an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import tvm
from tvm import relax
from tvm.relax import op

from ..autodiff.gradient import Gradient, add_adjoint
from ..ir.compat import dtype_of
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
from ._optimizer import Optimizer, Update, rates_of
from ._scaling import FIRST_SCALE, cotangent, next_scale, unscaled
from ._shards import Shards
from ._slots import EMA, GOOD_STEPS, GRADIENT, LOSS_SCALE, MASTER, STEP, Slot
from ._source import Source
from ._tensors import Emit, computed_in, in_dtype, shape_of
from ._totals import count_of_invalid, invalid, sum_of_squares, total_over_workers

#: The largest denominator that PyTorch adds to the norm of the gradients.
_NORM_EPS = 1e-6


@dataclass(frozen=True)
class Settings:
    """The arguments of :func:`train_step` after the optimizer."""

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
        lr, decay = rates_of(self.optimizer)
        return {self.lr: lr, **({self.weight_decay: decay} if decay else {})}


#: Adds the adjoint of a source's function: ``(source, variables, name, cotangent) -> module``. It
#: returns ``(result, gradients, own loss)``; ``cotangent`` is the name of a last parameter, or
#: None.
Differentiate = Callable[[Source, list[relax.Var], str, "str | None"], tvm.IRModule]


@dataclass(frozen=True)
class _Operands:
    """The operands of an update: the tensors by their names, the scalars, and the number of the
    update.

    ``shared`` has scalars of :class:`Update` for each group.
    """

    params: Mapping[str, relax.Expr]
    gradients: Mapping[str, relax.Expr]
    slots: Mapping[str, relax.Expr]
    scalars: Mapping[str, relax.Expr]
    step: relax.Expr
    shared: dict[str, dict] = field(default_factory=dict)


class Build:
    """The construction of the functions of a step.

    Parameters
    ----------
    differentiate : Differentiate or None
        Differentiates the loss, with the own loss of a worker as a further metric; by default
        ``Gradient`` does.
    shards : int
        The number of workers among which the optimizer's state is divided. Its tensors are then
        vectors: a worker's part of the elements, with zeros after the last ones. If parameters are
        divided, they are the workers of the same place in each group.
    divided : Collection[str]
        The parameters of which each worker has a part; None if the workers have no groups. The
        function takes the parts. Norms are over all parts.

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
        divided: Collection[str] | None = None,
    ):
        self.source, self.groups, self.settings = source, groups, settings
        self._differentiate = differentiate
        self._shards = Shards(shards, of_peers=divided is not None)
        self._divided = frozenset(divided or ())
        self.types = source.signature.types(source.function, "params")
        self.hyperparameters = {
            name: default for group in groups for name, default in group.hyperparameters.items()
        }
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
        types = {STEP: relax.TensorType((), "int64")}
        self.fills[STEP] = 0
        if self.settings.is_dynamic:
            types[LOSS_SCALE] = relax.TensorType((), "float32")
            types[GOOD_STEPS] = relax.TensorType((), "int64")
            self.fills.update({LOSS_SCALE: FIRST_SCALE, GOOD_STEPS: 0})
        for group in self.groups:
            for name in group.names:
                ty = self.types[name]
                whole = relax.TensorType(ty.shape, computed_in(ty))
                group.optimizer.check_param(name, shape_of(ty))
                self._check_shards(group.optimizer, name)
                fills = {
                    **group.optimizer.slots(),
                    **({MASTER: 0.0} if computed_in(ty) != dtype_of(ty) else {}),
                    **({EMA: 0.0} if self.settings.ema is not None else {}),
                    **({GRADIENT: 0.0} if self.settings.accumulate > 1 else {}),
                }
                for kind, fill in fills.items():
                    slot = str(Slot(kind, name))
                    is_whole = self._shards.count == 1 or kind == GRADIENT
                    types[slot] = whole if is_whole else self._shards.type_of_part(whole)
                    self.fills[slot] = fill
        return types

    def _check_shards(self, optimizer: Optimizer, name: str) -> None:
        if name in self._divided and not optimizer.is_elementwise:
            raise ValueError(
                f"{name} cannot be divided among workers with {type(optimizer).__name__}, "
                "because the update of an element depends on others; use another optimizer, or "
                "leave the parameter whole"
            )
        if self._shards.count > 1 and not optimizer.is_elementwise:
            raise ValueError(
                f"the state of {type(optimizer).__name__} cannot be divided among workers, "
                f"because the update of an element of {name} depends on others; use another "
                "optimizer, or leave the state whole"
            )

    def module(self) -> tvm.IRModule:
        """Return the module of the source with the function ``step``, and ``accumulate`` where it
        is needed."""
        module, adjoint = self._differentiated()
        functions = {"step": self._function(module, adjoint, updates=True)}
        if self.settings.accumulate > 1:
            functions["accumulate"] = self._function(module, adjoint, updates=False)
        if self.settings.remat is not None:
            mark = as_attribute(self.settings.remat)
            functions = {
                name: function.with_attr(REMAT, mark) for name, function in functions.items()
            }
        with_steps = with_functions(self.source.module, functions, without=self._unneeded())
        return _with_called(with_steps, module)

    def _unneeded(self) -> list[str]:
        """Return the functions of the model that neither the step calls nor prediction."""
        module = self.source.module
        left = set(with_only(module, self._others()).get_global_vars())
        return sorted(v.name_hint for v in module.get_global_vars() if v not in left)

    def _others(self) -> list[str]:
        """Return the functions that stay: that for prediction, or all but the loss of a module
        without one."""
        if self.source.forward:
            return [self.source.forward.name]
        names = [variable.name_hint for variable in self.source.module.get_global_vars()]
        return [name for name in names if name != self.source.name]

    def _differentiated(self) -> tuple[tvm.IRModule, relax.GlobalVar]:
        source = self.source
        function = source.function
        variables = [function.params[at] for at in source.signature.params.values()]
        taken = {param.name for param in function.params}
        is_scaled = self.settings.loss_scale is not None
        scaled = unused("loss_scale", taken) if is_scaled else None
        names = {variable.name_hint for variable in source.module.get_global_vars()}
        name = unused(f"{source.name}_adjoint", names)
        if self._differentiate is not None:
            module = self._differentiate(source, variables, name, scaled)
            return module, module.get_global_var(name)
        gradient = Gradient(
            source.name, variables, source.loss if source.loss else 0, cotangents=scaled or False
        )
        module = add_adjoint(source.module, gradient, name)
        return module, module.get_global_var(name)

    def _function(
        self, module: tvm.IRModule, adjoint: relax.GlobalVar, updates: bool
    ) -> relax.Function:
        """Return the function ``step``, or ``accumulate``, which updates no parameter."""
        source = self.source
        signature, function = source.signature, source.function
        batch = {
            name: relax.Var(name, ty) for name, ty in signature.types(function, "batch").items()
        }
        scalars = {
            name: relax.Var(identifier(name), relax.TensorType((), "float64"))
            for name in self.hyperparameters
        }
        seed = relax.Var("seed", relax.TensorType((), "int64"))
        types = {group: signature.types(function, group) for group in MODEL_GROUPS}
        types["optimizer_state"] = self.slots
        tuples = {
            group: relax.Var(group, relax.TupleType(list(fields.values())))
            for group, fields in types.items()
        }
        bb = relax.BlockBuilder(module)
        name = "step" if updates else "accumulate"
        free_name = unused(name, {variable.name_hint for variable in module.get_global_vars()})
        with bb.function(free_name, [*batch.values(), *scalars.values(), seed, *tuples.values()]):
            groups = {
                group: {
                    key: bb.emit(relax.TupleGetItem(tuples[group], i)) for i, key in enumerate(keys)
                }
                for group, keys in types.items()
            }
            model = {key: value for group in MODEL_GROUPS for key, value in groups[group].items()}
            arguments = signature.arguments(batch, model, seed)
            variable = bb.emit_func_output(
                self._body(bb.emit, adjoint, arguments, groups, scalars, updates)
            )
        caller, callee = bb.finalize()[variable], module[adjoint.name_hint]
        whole = None
        if self._differentiate is None and self.settings.accumulate == 1:  # the only caller
            whole = write_out_adjoint(caller, adjoint, callee)
        if whole is None:
            whole = copy_with_new_vars(write_out_calls(caller, {adjoint: callee}))
        return whole.with_attr("global_symbol", name)

    def _body(
        self,
        emit: Emit,
        adjoint: relax.GlobalVar,
        arguments: Sequence[relax.Expr],
        groups: Mapping[str, Mapping[str, relax.Expr]],
        scalars: Mapping[str, relax.Expr],
        updates: bool,
    ) -> relax.Expr:
        settings, source = self.settings, self.source
        params, states, slots = (groups[key] for key in ("params", "states", "optimizer_state"))
        scale = slots[LOSS_SCALE] if settings.is_dynamic else settings.loss_scale
        if scale is not None:
            loss_type = _type_at(source.function.ret_ty, source.loss)
            arguments = [*arguments, cotangent(emit, loss_type, scale)]
        call = emit(relax.Call(adjoint, arguments))
        result = emit(relax.TupleGetItem(call, 0))
        partials = emit(relax.TupleGetItem(call, 1))
        loss = _field(emit, result, source.loss)
        outputs = [_field(emit, result, source.outputs[name]) for name in self.outputs]
        new_states = {name: _field(emit, result, path) for name, path in source.new_states.items()}
        gradients: Mapping[str, relax.Expr] = {
            name: in_dtype(emit, relax.TupleGetItem(partials, i), computed_in(self.types[name]))
            for i, name in enumerate(params)
        }
        gradients = unscaled(emit, gradients, scale, settings.accumulate)
        if settings.accumulate > 1:
            gradients = {
                name: emit(op.add(slots[str(Slot(GRADIENT, name))], gradient))
                for name, gradient in gradients.items()
            }
        if updates:
            metrics, params, states, slots = self._updated(
                emit, loss, gradients, params, states, new_states, slots, scalars
            )
        else:
            metrics, states, slots = self._summed(emit, loss, gradients, states, new_states, slots)
        if self._differentiate is not None:
            own = emit(op.astype(emit(relax.TupleGetItem(call, 2)), "float32"))
            metrics = [emit(op.reshape(own, ())) if own.ty.ndim else own, *metrics]
        results = [metrics, outputs, params.values(), states.values(), slots.values()]
        return relax.Tuple([loss, *(relax.Tuple(list(fields)) for fields in results)])

    def _summed(
        self,
        emit: Emit,
        loss: relax.Expr,
        sums: Mapping[str, relax.Expr],
        states: Mapping[str, relax.Expr],
        new_states: Mapping[str, relax.Expr],
        slots: Mapping[str, relax.Expr],
    ) -> tuple[list[relax.Expr], Mapping[str, relax.Expr], Mapping[str, relax.Expr]]:
        """Return the metrics, and the new states and slots of a batch whose gradient is only added
        to the sums."""
        settings = self.settings
        metrics = {"grad_norm": relax.const(0.0, "float32")}
        new_slots = {**slots, **{str(Slot(GRADIENT, name)): total for name, total in sums.items()}}
        if settings.skips:
            is_finite = self._is_finite(emit, loss, sums)
            keep = _selection(emit, is_finite)
            new_states, new_slots = keep(new_states, states), keep(new_slots, slots)
            metrics["applied"] = emit(op.astype(is_finite, "float32"))
        if settings.is_dynamic:
            # Steps without overflow count when they update.
            new_slots.update(next_scale(emit, is_finite, slots, counts=False))
            metrics["loss_scale"] = slots[LOSS_SCALE]
        return self._in_order(metrics), new_states, new_slots

    def _in_order(self, metrics: Mapping[str, relax.Expr]) -> list[relax.Expr]:
        """Return the metrics of a step but a worker's own loss."""
        return [metrics[name] for name in self.metrics if name != "own_loss"]

    def _updated(
        self,
        emit: Emit,
        loss: relax.Expr,
        gradients: Mapping[str, relax.Expr],
        params: Mapping[str, relax.Expr],
        states: Mapping[str, relax.Expr],
        new_states: Mapping[str, relax.Expr],
        slots: Mapping[str, relax.Expr],
        scalars: Mapping[str, relax.Expr],
    ) -> tuple[list[relax.Expr], Mapping, Mapping, Mapping]:
        """Return the metrics, and the new parameters, states and slots."""
        settings, metrics = self.settings, {}
        # Clipped, an infinite gradient is finite.
        is_finite = self._is_finite(emit, loss, gradients) if settings.skips else None
        if settings.clip_value is not None:
            bound = float(settings.clip_value)
            gradients = {name: emit(_within(bound, one)) for name, one in gradients.items()}
        if settings.clip_norm is not None:
            gradients, metrics["grad_norm"] = self._clipped(emit, gradients, settings.clip_norm)
        count = emit(op.add(slots[STEP], relax.const(1, "int64")))
        step = emit(op.astype(count, "float64"))
        operands = _Operands(params, gradients, slots, scalars, step)
        keep = _selection(emit, is_finite)
        updated: dict[str, relax.Expr] = {}
        new_slots = dict(slots)
        for group in self.groups:
            for name in group.names:
                new, changed = self._update_parameter(emit, group, name, operands)
                # One loop computes neighbours: the update and the selection of its results.
                updated.update(keep({name: new}, params))
                new_slots.update(keep(changed, slots))
        new_params = {name: updated[name] for name in params}
        others = {STEP: count}
        if settings.accumulate > 1:
            sums = [str(Slot(GRADIENT, name)) for name in params]
            others |= {slot: emit(op.zeros_like(slots[slot])) for slot in sums}
        new_slots.update(keep(others, slots))
        if settings.skips:
            new_states = keep(new_states, states)
            metrics["applied"] = emit(op.astype(is_finite, "float32"))
        if settings.is_dynamic:
            new_slots.update(next_scale(emit, is_finite, slots))
            metrics["loss_scale"] = slots[LOSS_SCALE]
        return self._in_order(metrics), new_params, new_states, new_slots

    def _update_parameter(
        self, emit: Emit, group: Group, name: str, operands: _Operands
    ) -> tuple[relax.Expr, dict[str, relax.Expr]]:
        """Return a new parameter and its new slots."""
        ty, shards, optimizer = self.types[name], self._shards, group.optimizer
        param, gradient, slots = operands.params[name], operands.gradients[name], operands.slots
        is_half = computed_in(ty) != dtype_of(ty)
        master, average = str(Slot(MASTER, name)), str(Slot(EMA, name))
        if optimizer.maximize:
            gradient = emit(op.negative(gradient))
        old = slots[master] if is_half else param
        if shards.count > 1:
            gradient = shards.part(emit, gradient)
            old = old if is_half else shards.part(emit, param)
        update = Update(
            emit=emit,
            dtype=computed_in(ty),
            name=name,
            param=old,
            gradient=gradient,
            slots={kind: slots[str(Slot(kind, name))] for kind in optimizer.slots()},
            lr=operands.scalars[group.lr],
            weight_decay=operands.scalars.get(group.weight_decay, relax.const(0.0, "float64")),
            step=operands.step,
            shared=operands.shared.setdefault(group.lr, {}),
        )
        new, values = optimizer.update(update)
        changed = {str(Slot(kind, name)): value for kind, value in values.items()}
        if self.settings.ema is not None:
            changed[average] = update.mixed(slots[average], new, float(self.settings.ema))
        if is_half:
            changed[master] = new
            new = emit(op.astype(new, dtype_of(ty)))
        return new if shards.count == 1 else shards.whole(emit, new, ty), changed

    def _clipped(
        self, emit: Emit, gradients: Mapping[str, relax.Expr], clip_norm: float
    ) -> tuple[dict[str, relax.Expr], relax.Expr]:
        """Return gradients whose norm is at most ``clip_norm``, and their norm before."""
        norm = emit(op.sqrt(total_over_workers(emit, gradients, self._divided, sum_of_squares)))
        dtype = dtype_of(norm.ty)
        bound = relax.const(float(clip_norm), dtype)
        ratio = op.divide(bound, op.add(norm, relax.const(_NORM_EPS, dtype)))
        factor = emit(op.minimum(relax.const(1.0, dtype), ratio))  # in this order, NaN is kept
        clipped = {
            name: emit(op.multiply(gradient, op.astype(factor, dtype_of(gradient.ty))))
            for name, gradient in gradients.items()
        }
        return clipped, emit(op.astype(norm, "float32"))

    def _is_finite(
        self, emit: Emit, loss: relax.Expr, gradients: Mapping[str, relax.Expr]
    ) -> relax.Expr:
        """Return whether the loss and all gradients are finite."""
        count = emit(op.sum(invalid(loss)))
        if gradients:
            more = total_over_workers(emit, gradients, self._divided, count_of_invalid)
            count = emit(op.add(count, more))
        return emit(op.equal(count, relax.const(0.0, "float32")))


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


def _within(bound: float, gradient: relax.Expr) -> relax.Expr:
    """Return a gradient with elements from ``-bound`` to ``bound``.

    ``clip`` makes a bound of NaN, which then is an update. Extremes return their second operand
    where it is NaN.
    """
    dtype = dtype_of(gradient.ty)
    low, high = relax.const(-bound, dtype), relax.const(bound, dtype)
    return op.maximum(low, op.minimum(high, gradient))


def _selection(emit: Emit, condition: relax.Expr | None) -> Callable[[Mapping, Mapping], dict]:
    """Return a function that selects new or old values; new ones if there is no condition."""

    def keep(new: Mapping, old: Mapping) -> dict:
        return {
            name: value
            if condition is None or value.same_as(old[name])
            else emit(op.where(condition, value, old[name]))
            for name, value in new.items()
        }

    return keep


def _field(emit: Emit, value: relax.Expr, path: Iterable[int]) -> relax.Expr:
    for i in path:
        value = emit(relax.TupleGetItem(value, i))
    return value


def _type_at(ty: relax.Type, path: Iterable[int]) -> relax.Type:
    for i in path:
        ty = ty.fields[i]
    return ty
