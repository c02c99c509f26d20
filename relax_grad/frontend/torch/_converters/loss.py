"""Converters of losses whose decompositions have other values or gradients than PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from tvm import relax

from ._call import Call, converts, dtype, extents_of, scalar, static, wide_dtype

LOSS: dict[str, Callable] = {}

_op = relax.op


def _reduced(call: Call, value, reduction: int) -> relax.Expr:
    """Return elements, their mean or their sum, in the dtype of the result."""
    if reduction:
        value = call.emit((_op.mean, _op.sum)[reduction - 1](value))
    return call.cast(value, call.dtype)


def _parts(call: Call, data, target, bound: float) -> tuple:
    """Return where the difference is below a bound, the difference there, and its absolute value.

    An infinite difference has no square, whose gradient would be NaN.
    """
    kind = wide_dtype(call.dtype)
    operands = (call.cast(operand, kind) for operand in (data, target))
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


@converts(LOSS, "multilabel_margin_loss.default")
def _multilabel_margin(call, data, target, reduction):
    """The labels before the first -1 count; PyTorch's decomposition has another value if there is
    one."""
    kind = wide_dtype(dtype(data))
    (classes,) = static((extents_of(data) or [1])[-1:], "the number of classes")
    data = call.reshape(call.cast(data, kind), [-1, classes])
    target = call.reshape(target, [-1, classes])
    places = relax.const(np.arange(classes), "int64")
    ends = call.emit(_op.equal(target, scalar(-1, "int64")))
    end = call.emit(_op.where(ends, places, scalar(classes, "int64")))
    valid = call.emit(_op.less(places, call.emit(_op.min(end, [1], True))))
    inner = call.emit(_op.where(valid, target, scalar(0, "int64")))
    wanted = call.emit(_op.expand_dims(_op.gather_elements(data, inner, 1), 2))
    valid = call.emit(_op.expand_dims(valid, 2))  # row, label, class
    hits = call.emit(_op.logical_and(valid, _op.equal(_op.expand_dims(target, 2), places)))
    hit = call.emit(_op.max(call.cast(hits, "int8"), [1], True))
    margin = _op.add(_op.subtract(scalar(1, kind), wanted), _op.expand_dims(data, 1))
    margin = call.emit(margin)
    counts = call.emit(_op.logical_and(valid, _op.equal(hit, scalar(0, "int8"))))
    counts = call.emit(_op.logical_and(counts, _op.greater(margin, scalar(0, kind))))
    margin = call.emit(_op.where(counts, margin, scalar(0, kind)))
    total = call.emit(_op.divide(_op.sum(margin, [1, 2]), scalar(classes, kind)))
    return call.reshape(_reduced(call, total, reduction), call.shape)
