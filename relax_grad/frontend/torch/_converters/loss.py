"""Converters of losses whose decompositions have other gradients than PyTorch at infinite differences."""

from __future__ import annotations

from collections.abc import Callable

from tvm import relax

from ._call import Call, converts, dtype, scalar, wide

LOSS: dict[str, Callable] = {}

_op = relax.op


def _reduced(call: Call, value, reduction: int) -> relax.Expr:
    """Return elements, their mean or their sum, in the dtype of the result."""
    if reduction:
        value = call.emit((None, _op.mean, _op.sum)[reduction](value))
    return call.cast(value, call.dtype)


def _parts(call: Call, data, target, bound: float) -> tuple:
    """Return where the difference is below a bound, the difference there, and its absolute value.

    An infinite difference has no square, whose gradient would be NaN.
    """
    kind = wide(call.dtype)
    operands = (call.cast(each, kind) for each in (data, target))
    difference = call.emit(_op.subtract(*operands))
    size = call.emit(_op.abs(difference))
    wrong = call.emit(_op.isnan(difference))
    near = call.emit(_op.logical_or(wrong, _op.less(size, scalar(bound, kind))))
    return near, call.emit(_op.where(near, difference, scalar(0, kind))), size


@converts(LOSS, "smooth_l1_loss.default")
def _smooth_l1(call, data, target, reduction, beta):
    near, inner, size = _parts(call, data, target, beta)
    kind = dtype(size)
    if not beta:
        return _reduced(call, size, reduction)
    square = call.emit(_op.multiply(_op.multiply(inner, inner), scalar(0.5 / beta, kind)))
    line = call.emit(_op.subtract(size, scalar(0.5 * beta, kind)))
    return _reduced(call, call.emit(_op.where(near, square, line)), reduction)


@converts(LOSS, "huber_loss.default")
def _huber(call, data, target, reduction, delta):
    near, inner, size = _parts(call, data, target, delta)
    kind = dtype(size)
    square = call.emit(_op.multiply(_op.multiply(inner, inner), scalar(0.5, kind)))
    line = call.emit(_op.subtract(size, scalar(0.5 * delta, kind)))
    line = call.emit(_op.multiply(line, scalar(delta, kind)))
    return _reduced(call, call.emit(_op.where(near, square, line)), reduction)
