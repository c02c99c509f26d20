"""The end of a training step: the gradients are clipped, and update the parameters and the state of
the optimizer, or are added to a sum."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tvm import relax
from tvm.relax import op

from ..ir.compat import dtype_of
from ._optimizer import Update
from ._recipe import Group, Recipe
from ._scaling import next_scale
from ._slots import EMA, GRADIENT, LOSS_SCALE, MASTER, STEP, Slot
from ._tensors import Emit, computed_in
from ._totals import count_of_invalid, invalid, sum_of_squares, total_over_workers

#: The largest denominator that PyTorch adds to the norm of the gradients.
_NORM_EPS = 1e-6

#: Values by their names.
Values = Mapping[str, relax.Expr]


@dataclass(frozen=True)
class Given:
    """The arguments of a step: the tensors of its groups, and the hyperparameters."""

    params: Values
    states: Values
    slots: Values
    scalars: Values


@dataclass(frozen=True)
class Passed:
    """The results of the forward and the backward pass.

    Attributes
    ----------
    loss : relax.Expr
        The loss.
    gradients : Values
        The gradients of the parameters, or their sums over several batches.
    states : Values
        The new states.
    """

    loss: relax.Expr
    gradients: Values
    states: Values


@dataclass(frozen=True)
class Results:
    """The results of a step besides the loss and the model's outputs."""

    metrics: Values
    params: Values
    states: Values
    slots: Values


@dataclass(frozen=True)
class _Operands:
    """The operands of an update: the gradients, and the number of the update.

    ``shared`` has scalars of :class:`Update` for each group.
    """

    given: Given
    gradients: Values
    step: relax.Expr
    shared: dict[str, dict] = field(default_factory=dict)


def summed(recipe: Recipe, emit: Emit, given: Given, passed: Passed) -> Results:
    """Return the results of a batch whose gradient is only added to the sums."""
    settings, slots, states = recipe.settings, given.slots, passed.states
    metrics: dict[str, relax.Expr] = {"grad_norm": relax.const(0.0, "float32")}
    sums = {str(Slot(GRADIENT, name)): total for name, total in passed.gradients.items()}
    new_slots = {**slots, **sums}
    if settings.skips:
        is_finite = _is_finite(recipe, emit, passed)
        keep = _selection(emit, is_finite)
        states, new_slots = keep(states, given.states), keep(new_slots, slots)
        metrics["applied"] = emit(op.astype(is_finite, "float32"))
    if settings.is_dynamic:
        # Steps without overflow count when they update.
        new_slots.update(next_scale(emit, is_finite, slots, counts=False))
        metrics["loss_scale"] = slots[LOSS_SCALE]
    return Results(metrics, given.params, states, new_slots)


def updated(recipe: Recipe, emit: Emit, given: Given, passed: Passed) -> Results:
    """Return the results of a batch that updates the parameters."""
    settings, slots, states = recipe.settings, given.slots, passed.states
    # Clipped, an infinite gradient is finite.
    is_finite = _is_finite(recipe, emit, passed) if settings.skips else None
    gradients, metrics = _clipped(recipe, emit, passed.gradients)
    count = emit(op.add(slots[STEP], relax.const(1, "int64")))
    operands = _Operands(given, gradients, emit(op.astype(count, "float64")))
    keep = _selection(emit, is_finite)
    params: dict[str, relax.Expr] = {}
    new_slots = dict(slots)
    for group in recipe.groups:
        for name in group.names:
            new, changed = _update_parameter(recipe, emit, group, name, operands)
            # One loop computes neighbours: the update and the selection of its results.
            params.update(keep({name: new}, given.params))
            new_slots.update(keep(changed, slots))
    others = {STEP: count}
    if settings.accumulate > 1:
        sums = [str(Slot(GRADIENT, name)) for name in given.params]
        others |= {slot: emit(op.zeros_like(slots[slot])) for slot in sums}
    new_slots.update(keep(others, slots))
    if is_finite is not None:
        states = keep(states, given.states)
        metrics["applied"] = emit(op.astype(is_finite, "float32"))
    if settings.is_dynamic:
        new_slots.update(next_scale(emit, is_finite, slots))
        metrics["loss_scale"] = slots[LOSS_SCALE]
    return Results(metrics, {name: params[name] for name in given.params}, states, new_slots)


def _update_parameter(
    recipe: Recipe, emit: Emit, group: Group, name: str, operands: _Operands
) -> tuple[relax.Expr, dict[str, relax.Expr]]:
    """Return a new parameter and its new slots."""
    ty, shards, optimizer = (
        recipe.source.types["params"][name],
        recipe.workers.division,
        group.optimizer,
    )
    given, gradient, ema = operands.given, operands.gradients[name], recipe.settings.ema
    param, slots, scalars = given.params[name], given.slots, given.scalars
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
        lr=scalars[group.lr],
        weight_decay=scalars.get(group.weight_decay, relax.const(0.0, "float64")),
        step=operands.step,
        shared=operands.shared.setdefault(group.lr, {}),
    )
    new, values = optimizer.update(update)
    changed = {str(Slot(kind, name)): value for kind, value in values.items()}
    if ema is not None:
        changed[average] = update.mixed(slots[average], new, float(ema))
    if is_half:
        changed[master] = new
        new = emit(op.astype(new, dtype_of(ty)))
    return new if shards.count == 1 else shards.whole(emit, new, ty), changed


def _clipped(recipe: Recipe, emit: Emit, gradients: Values) -> tuple[Values, dict[str, relax.Expr]]:
    """Return gradients that are clipped as the settings say, and the metrics: their norm before."""
    clip_value, clip_norm = recipe.settings.clip_value, recipe.settings.clip_norm
    if clip_value is not None:
        bound = float(clip_value)
        gradients = {name: emit(_within(bound, one)) for name, one in gradients.items()}
    if clip_norm is None:
        return gradients, {}
    divided = recipe.workers.divided or ()
    norm = emit(op.sqrt(total_over_workers(emit, gradients, divided, sum_of_squares)))
    dtype = dtype_of(norm.ty)
    largest = relax.const(float(clip_norm), dtype)
    ratio = op.divide(largest, op.add(norm, relax.const(_NORM_EPS, dtype)))
    factor = emit(op.minimum(relax.const(1.0, dtype), ratio))  # in this order, NaN is kept
    clipped = {
        name: emit(op.multiply(gradient, op.astype(factor, dtype_of(gradient.ty))))
        for name, gradient in gradients.items()
    }
    return clipped, {"grad_norm": emit(op.astype(norm, "float32"))}


def _within(bound: float, gradient: relax.Expr) -> relax.Expr:
    """Return a gradient with elements from ``-bound`` to ``bound``.

    ``clip`` makes a bound of NaN, which then is an update. Extremes return their second operand
    where it is NaN.
    """
    dtype = dtype_of(gradient.ty)
    low, high = relax.const(-bound, dtype), relax.const(bound, dtype)
    return op.maximum(low, op.minimum(high, gradient))


def _is_finite(recipe: Recipe, emit: Emit, passed: Passed) -> relax.Expr:
    """Return whether the loss and all gradients are finite."""
    count = emit(op.sum(invalid(passed.loss)))
    if passed.gradients:
        divided = recipe.workers.divided or ()
        more = total_over_workers(emit, passed.gradients, divided, count_of_invalid)
        count = emit(op.add(count, more))
    return emit(op.equal(count, relax.const(0.0, "float32")))


def _selection(emit: Emit, condition: relax.Expr | None) -> Callable[[Values, Values], dict]:
    """Return a function that selects new or old values; new ones if there is no condition."""

    def keep(new: Values, old: Values) -> dict:
        return {
            name: value
            if condition is None or value.same_as(old[name])
            else emit(op.where(condition, value, old[name]))
            for name, value in new.items()
        }

    return keep
