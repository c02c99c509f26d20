"""Converters of activation functions; their gradients at kinks are PyTorch's.

At NaN, the gradients are as in PyTorch's vector loops, from which its scalar loops differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from tvm import relax

from ....op import stop_gradient
from ._call import Call, axis_of, converts, dtype, scalar, wide_dtype
from ._support import Converter
from .elementwise import expm1, log1p

ACTIVATION: dict[str, Converter] = {}

_op = relax.op

#: The threshold above which the second derivative of softplus is below its rounding.
_STRAIGHT = 15


def _activation(*names: str) -> Callable:
    """Enter a function that computes half precision in float32, as PyTorch does."""

    def enter(function: Callable) -> Callable:
        def convert(call: Call, data: relax.Expr, **arguments: Any) -> relax.Expr:
            inner = call.cast(data, wide_dtype(dtype(data)))
            return call.cast(call.emit(function(call, inner, **arguments)), dtype(data))

        converts(ACTIVATION, *names)(convert)
        return function

    return enter


@converts(ACTIVATION, "relu.default")
def _relu(call: Call, data: relax.Expr) -> relax.Expr:
    """NaN stays, which Relax's relu drops."""
    zero = scalar(0, dtype(data))
    if "float" not in dtype(data):
        return _op.maximum(data, zero)
    return _op.where(_op.less_equal(data, zero), zero, data)


@_activation("gelu.default")
def _gelu(call: Call, data: relax.Expr, approximate: str) -> relax.Expr:
    return (_op.nn.gelu_tanh if approximate == "tanh" else _op.nn.gelu)(data)


@_activation("silu.default")
def _silu(call: Call, data: relax.Expr) -> relax.Expr:
    return _op.nn.silu(data)


@_activation("mish.default")
def _mish(call: Call, data: relax.Expr) -> relax.Expr:
    return _op.multiply(data, _op.tanh(_softplus_of(call, data)))


def _softplus_of(call: Call, data: relax.Expr) -> relax.Expr:
    """Return ``log(1 + exp(x))``, which never overflows.

    It is one of two formulas, which both have the derivatives of every order: ``abs`` and
    ``maximum`` have no second derivative at 0.
    """
    positive = call.emit(_op.greater(data, scalar(0, dtype(data))))
    small = call.emit(_op.exp(call.emit(_op.where(positive, _op.negative(data), data))))
    linear = call.emit(_op.where(positive, data, scalar(0, dtype(data))))
    return call.emit(_op.add(linear, log1p(call, small)))


@_activation("elu.default")
def _elu(
    call: Call, data: relax.Expr, alpha: float, scale: float, input_scale: float
) -> relax.Expr:
    """The second derivative at zero is zero."""
    kind = dtype(data)
    zero, steep = scalar(0, kind), scale * alpha * input_scale
    positive = call.emit(_op.greater(data, zero))
    straight = call.emit(_op.greater_equal(data, zero))
    exponent = call.emit(_op.where(straight, zero, data))
    exponent = call.emit(_op.multiply(exponent, scalar(input_scale, kind)))
    curve = _op.multiply(expm1(call, exponent), scalar(alpha * scale, kind))
    slope = call.emit(_op.where(positive, scalar(scale, kind), scalar(steep, kind)))
    return _op.where(straight, _op.multiply(data, slope), call.emit(curve))


@_activation("celu.default")
def _celu(call: Call, data: relax.Expr, alpha: float) -> relax.Expr:
    return _elu(call, data, alpha, 1.0, 1.0 / alpha)


@_activation("selu.default")
def _selu(call: Call, data: relax.Expr) -> relax.Expr:
    return _elu(call, data, 1.6732632423543772, 1.0507009873554805, 1.0)


@_activation("leaky_relu.default")
def _leaky_relu(call: Call, data: relax.Expr, negative_slope: float) -> relax.Expr:
    kind = dtype(data)
    positive = _op.greater(data, scalar(0, kind))
    return _op.where(positive, data, _op.multiply(data, scalar(negative_slope, kind)))


@_activation("hardtanh.default")
def _hardtanh(call: Call, data: relax.Expr, min_val: float, max_val: float) -> relax.Expr:
    """The bounds do not belong to the range in which the operand has its gradient, nor does NaN."""
    kind = dtype(data)
    low, high = scalar(min_val, kind), scalar(max_val, kind)
    inside = call.emit(_op.logical_and(_op.greater(data, low), _op.less(data, high)))
    fixed = call.emit(stop_gradient(data))
    above = call.emit(_op.where(_op.greater_equal(fixed, high), high, fixed))
    outside = call.emit(_op.where(_op.less_equal(fixed, low), low, above))
    return _op.where(inside, data, outside)


@_activation("relu6.default")
def _relu6(call: Call, data: relax.Expr) -> relax.Expr:
    return _hardtanh(call, data, 0, 6)


@_activation("hardsigmoid.default")
def _hardsigmoid(call: Call, data: relax.Expr) -> relax.Expr:
    """NaN stays, and has no gradient."""
    kind = dtype(data)
    line = call.emit(_op.divide(_op.add(data, scalar(3, kind)), scalar(6, kind)))
    fixed = call.emit(stop_gradient(line))
    above = call.emit(_op.where(_op.greater_equal(data, scalar(3, kind)), scalar(1, kind), fixed))
    outside = call.emit(_op.where(_op.less_equal(data, scalar(-3, kind)), scalar(0, kind), above))
    inside = _op.less(_op.abs(data), scalar(3, kind))
    return _op.where(inside, line, outside)


@_activation("hardswish.default")
def _hardswish(call: Call, data: relax.Expr) -> relax.Expr:
    """NaN has the gradient NaN; a negative infinity becomes NaN, and has none."""
    kind = dtype(data)
    zero, three = scalar(0, kind), scalar(3, kind)
    outer = call.emit(_op.greater_equal(_op.abs(data), three))
    inner = call.emit(_op.where(outer, zero, data))
    curve = call.emit(_op.divide(_op.multiply(inner, _op.add(inner, three)), scalar(6, kind)))
    fixed = call.emit(stop_gradient(data))
    low = call.emit(_op.less_equal(data, scalar(-3, kind)))
    lost = call.emit(_op.where(_op.isinf(fixed), scalar(math.nan, kind), zero))
    outside = call.emit(_op.where(low, lost, data))
    return _op.where(outer, outside, curve)


@_activation("softplus.default")
def _softplus(call: Call, data: relax.Expr, beta: float, threshold: float) -> relax.Expr:
    kind = dtype(data)
    scaled = call.emit(_op.multiply(data, scalar(beta, kind)))
    linear = call.emit(_op.greater(scaled, scalar(threshold, kind)))
    inner = call.emit(_op.where(linear, scalar(0, kind), scaled))
    value = call.emit(_op.divide(_softplus_of(call, inner), scalar(beta, kind)))
    value = call.emit(_op.where(linear, data, value))
    if threshold > _STRAIGHT:
        return value
    # At the threshold, the second derivative is zero.
    edge = call.emit(_op.equal(scaled, scalar(threshold, kind)))
    slope = scalar(1 / (1 + math.exp(-threshold)), kind)
    change = _op.multiply(_op.subtract(data, stop_gradient(data)), slope)
    return _op.where(edge, _op.add(stop_gradient(value), call.emit(change)), value)


@_activation("log_sigmoid.default")
def _log_sigmoid(call: Call, data: relax.Expr) -> relax.Expr:
    return _op.negative(_softplus_of(call, call.emit(_op.negative(data))))


@_activation("threshold.default")
def _threshold(call: Call, data: relax.Expr, threshold: float, value: float) -> relax.Expr:
    kind = dtype(data)
    return _op.where(_op.less_equal(data, scalar(threshold, kind)), scalar(value, kind), data)


@converts(ACTIVATION, "softmax.int", "_softmax.default", "log_softmax.int", "_log_softmax.default")
def _softmax(
    call: Call,
    data: relax.Expr,
    dim: int,
    dtype: torch.dtype | None = None,
    half_to_float: bool = False,
) -> relax.Expr:
    """Half precision is computed in float32."""
    logarithm = "log" in call.node.target.__name__
    data = call.cast(data, wide_dtype(call.dtype))
    rank = data.ty.ndim
    function = _op.nn.log_softmax if logarithm else _op.nn.softmax
    if not rank:
        result = call.emit(function(call.reshape(data, [1]), 0))
        return call.cast(call.reshape(result, []), call.dtype)
    return call.cast(call.emit(function(data, axis_of(dim, rank))), call.dtype)
