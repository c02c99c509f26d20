"""A factor of the loss while gradients are computed, for half precision."""

from __future__ import annotations

from collections.abc import Mapping

from tvm import relax
from tvm.relax import op

from ..ir.compat import dtype_of
from ._slots import GOOD_STEPS, LOSS_SCALE
from ._tensors import Emit

#: Dynamic loss scaling as in ``torch.amp.GradScaler``: the initial scale, its factors, and the
#: steps before it grows.
FIRST_SCALE, _GROWTH, _BACKOFF, _INTERVAL = 2.0**16, 2.0, 0.5, 2000


def cotangent(emit: Emit, loss: relax.TensorType, scale: float | relax.Expr) -> relax.Expr:
    """Return the cotangent of a loss of a type: the scale, a number or the slot of dynamic
    scaling."""
    dtype = dtype_of(loss)
    if isinstance(scale, relax.Expr):
        value = emit(op.astype(scale, dtype))
    else:
        value = relax.const(float(scale), dtype)
    return emit(op.full(loss.shape, value, dtype)) if len(loss.shape) else value


def unscaled(
    emit: Emit,
    gradients: Mapping[str, relax.Expr],
    scale: float | relax.Expr | None,
    accumulate: int,
) -> Mapping[str, relax.Expr]:
    """Return the share of gradients in the mean of ``accumulate`` batches, without the scale of the
    loss."""
    if isinstance(scale, relax.Expr):
        factor = emit(op.divide(relax.const(1.0 / accumulate, "float32"), scale))
        return {
            name: emit(op.multiply(gradient, op.astype(factor, dtype_of(gradient.ty))))
            for name, gradient in gradients.items()
        }
    number = 1.0 / (accumulate * float(scale or 1.0))
    if number == 1.0:
        return gradients
    return {
        name: emit(op.multiply(gradient, relax.const(number, dtype_of(gradient.ty))))
        for name, gradient in gradients.items()
    }


def next_scale(
    emit: Emit, is_finite: relax.Expr, slots: Mapping[str, relax.Expr], counts: bool = True
) -> dict[str, relax.Expr]:
    """Return the new scale of the loss, and the new count of steps without overflow, in which this
    one may count."""
    scale, good = slots[LOSS_SCALE], slots[GOOD_STEPS]
    smaller = op.multiply(scale, relax.const(_BACKOFF, "float32"))
    zero = relax.const(0, "int64")
    if not counts:
        return {
            LOSS_SCALE: emit(op.where(is_finite, scale, smaller)),
            GOOD_STEPS: emit(op.where(is_finite, good, zero)),
        }
    count = emit(op.add(good, relax.const(1, "int64")))
    grows = emit(op.equal(count, relax.const(_INTERVAL, "int64")))
    grown = op.where(grows, op.multiply(scale, relax.const(_GROWTH, "float32")), scale)
    return {
        LOSS_SCALE: emit(op.where(is_finite, grown, smaller)),
        GOOD_STEPS: emit(op.where(op.logical_and(is_finite, op.logical_not(grows)), count, zero)),
    }
