"""Converters of losses whose decompositions have other values or gradients than PyTorch."""

from __future__ import annotations

import numpy as np
from tvm import relax

from ....op import stop_gradient
from ._call import Call, axis_of, converts, dtype, extents_of, scalar, static, wide_dtype
from ._support import Converter
from .reduction import norm

LOSS: dict[str, Converter] = {}

_op = relax.op


def _reduced(call: Call, value: relax.Expr, reduction: int) -> relax.Expr:
    """Return elements, their mean or their sum, in the dtype of the result."""
    if reduction:
        value = call.emit((_op.mean, _op.sum)[reduction - 1](value))
    return call.cast(value, call.dtype)


def _parts(call: Call, data: relax.Expr, target: relax.Expr, bound: float) -> tuple:
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
def _smooth_l1(
    call: Call, data: relax.Expr, target: relax.Expr, reduction: int, beta: float
) -> relax.Expr:
    near, inner, size = _parts(call, data, target, beta)
    kind = dtype(size)
    if not beta:
        return _reduced(call, size, reduction)
    square = call.emit(_op.multiply(_op.multiply(inner, inner), scalar(0.5 / beta, kind)))
    line = call.emit(_op.subtract(size, scalar(0.5 * beta, kind)))
    return _reduced(call, call.emit(_op.where(near, square, line)), reduction)


@converts(LOSS, "huber_loss.default")
def _huber(
    call: Call, data: relax.Expr, target: relax.Expr, reduction: int, delta: float
) -> relax.Expr:
    near, inner, size = _parts(call, data, target, delta)
    kind = dtype(size)
    square = call.emit(_op.multiply(_op.multiply(inner, inner), scalar(0.5, kind)))
    line = call.emit(_op.subtract(size, scalar(0.5 * delta, kind)))
    line = call.emit(_op.multiply(line, scalar(delta, kind)))
    return _reduced(call, call.emit(_op.where(near, square, line)), reduction)


#: The least product of a probability and its complement in the gradient of the cross entropy, which
#: is a float32 in PyTorch's kernels, and the least logarithm in its value.
_LEAST_PRODUCT, _LEAST_LOGARITHM = float(np.float32(1e-12)), -100.0


@converts(LOSS, "binary_cross_entropy.default")
def _binary_cross_entropy(
    call: Call, data: relax.Expr, target: relax.Expr, weight: relax.Expr | None, reduction: int
) -> relax.Expr:
    """A saturated probability p has the gradient ``(p - target) / 1e-12`` of PyTorch's kernel, and
    not the gradient of a bounded logarithm."""
    kind = wide_dtype(call.dtype)
    data, target = call.cast(data, kind), call.cast(target, kind)
    one, least = scalar(1, kind), scalar(_LEAST_PRODUCT, kind)
    fixed = call.emit(stop_gradient(data))
    product = call.emit(_op.multiply(fixed, call.emit(_op.subtract(one, fixed))))
    saturated = call.emit(_op.less(product, least))

    def entropy(value: relax.Expr, bounded: bool) -> relax.Expr:
        rest = call.emit(_op.subtract(one, value))
        logs = [call.emit(_op.log(value)), call.emit(_op.log(rest))]
        if bounded:  # NaN, of a value that is no probability, stays
            bound = scalar(_LEAST_LOGARITHM, kind)
            logs = [call.emit(_op.where(_op.less(log, bound), bound, log)) for log in logs]
        other = call.emit(_op.subtract(one, target))
        parts = (_op.multiply(f, log) for f, log in zip((target, other), logs, strict=True))
        return call.emit(_op.negative(call.emit(_op.add(*map(call.emit, parts)))))

    inner = call.emit(_op.where(saturated, scalar(0.5, kind), data))
    slope = call.emit(_op.divide(_op.subtract(fixed, call.emit(stop_gradient(target))), least))
    line = _op.multiply(call.emit(_op.subtract(data, fixed)), slope)
    line = call.emit(_op.add(entropy(fixed, True), call.emit(line)))
    loss = call.emit(_op.where(saturated, line, entropy(inner, False)))
    if weight is not None:
        loss = call.emit(_op.multiply(loss, call.cast(weight, kind)))
    return _reduced(call, loss, reduction)


@converts(LOSS, "cosine_similarity.default")
def _cosine_similarity(
    call: Call, x1: relax.Expr, x2: relax.Expr, dim: int = 1, eps: float = 1e-8
) -> relax.Expr:
    """The bound of a norm passes the gradient, since PyTorch writes it within no_grad."""
    kind = wide_dtype(call.dtype)
    rank = max(x1.ty.ndim, x2.ty.ndim)
    axis, factors = axis_of(dim, rank), []
    for operand in (x1, x2):
        operand = call.cast(operand, kind)
        if operand.ty.ndim < rank:
            missing = list(range(rank - operand.ty.ndim))
            operand = call.emit(_op.expand_dims(operand, missing))
        size = norm(call, operand, 2.0, [axis], True)
        fixed = call.emit(stop_gradient(size))
        short = call.emit(_op.less(fixed, scalar(eps, kind)))
        raised = call.emit(_op.add(size, _op.subtract(scalar(eps, kind), fixed)))
        factors.append(call.emit(_op.divide(operand, call.emit(_op.where(short, raised, size)))))
    product = call.emit(_op.multiply(*factors))
    return call.cast(call.emit(_op.sum(product, [axis])), call.dtype)


@converts(LOSS, "multi_margin_loss.default")
def _multi_margin(
    call: Call,
    data: relax.Expr,
    target: relax.Expr,
    p: float = 1,
    margin: float = 1,
    weight: relax.Expr | None = None,
    reduction: int = 1,
) -> relax.Expr:
    """A class at the margin has no gradient, and NaN does not count; PyTorch's decomposition has
    both."""
    kind = wide_dtype(dtype(data))
    (classes,) = static((extents_of(data) or [1])[-1:], "the number of classes")
    data = call.reshape(call.cast(data, kind), [-1, classes])
    target = call.reshape(target, [-1, 1])
    wanted = call.emit(_op.gather_elements(data, target, 1))
    size = call.emit(_op.add(call.emit(_op.subtract(scalar(margin, kind), wanted)), data))
    others = call.emit(_op.not_equal(target, relax.const(np.arange(classes), "int64")))
    counts = call.emit(_op.logical_and(call.emit(_op.greater(size, scalar(0, kind))), others))
    size = call.emit(_op.where(counts, size, scalar(0, kind)))
    if p == 2:
        size = call.emit(_op.multiply(size, size))
    if weight is not None:
        chosen = call.emit(_op.take(call.cast(weight, kind), call.reshape(target, [-1]), 0))
        size = call.emit(_op.multiply(size, call.reshape(chosen, [-1, 1])))
    total = call.emit(_op.divide(call.emit(_op.sum(size, [1])), scalar(classes, kind)))
    return call.reshape(_reduced(call, total, reduction), call.shape)


@converts(LOSS, "multilabel_margin_loss.default")
def _multilabel_margin(
    call: Call, data: relax.Expr, target: relax.Expr, reduction: int
) -> relax.Expr:
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
