"""Converters of ONNX operators that replace TVM's.

TVM's converters of these operators emit tensor functions where Relax has an operator, have a
gradient that overflows, ignore attributes, or differ from ONNX. Each function takes the builder,
the operands (None for one that is left out), the attributes, and the version of the operators, and
returns the result; or None, for TVM's converter to continue, with the attributes as they are then.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import onnx
from tvm import relax, tirx

from ....ir.compat import constant_value, dtype_of
from ....op import stop_gradient
from ... import random


class Refused(Exception):
    """A node cannot be imported as ONNX defines it; the message says why, and how to go on."""


Builder: TypeAlias = "relax.BlockBuilder"

#: The operands of a node: expressions, and None for an operand that is left out.
Inputs: TypeAlias = "list[Any]"

#: The attributes of a node by their names, and what the importer tells converters.
Attrs: TypeAlias = "dict[str, Any]"

#: The result of a converter; None: TVM's converter continues.
Result: TypeAlias = "relax.Expr | None"

Converter: TypeAlias = "Callable[[Builder, Inputs, Attrs, int], Result]"

CONVERTERS: dict[str, Converter] = {}


def _converts(*names: str) -> Callable[[Converter], Converter]:
    def enter(function: Converter) -> Converter:
        CONVERTERS.update(dict.fromkeys(names, function))
        return function

    return enter


def _dtype(value: relax.Expr) -> str:
    return dtype_of(value.ty)


def _like(value: float, data: relax.Expr) -> relax.Expr:
    """Return a scalar of the dtype of a tensor."""
    return relax.const(value, _dtype(data))


def _is_float(value: relax.Expr) -> bool:
    return "float" in _dtype(value)


def _is_tensor(value: object) -> bool:
    return isinstance(getattr(value, "ty", None), relax.TensorType)


def _rank(data: relax.Expr) -> int:
    if data.ty.ndim < 0:
        raise Refused(
            "the rank of its operand is unknown; give the extents of the inputs: shapes={...}"
        )
    return data.ty.ndim


def _extents(data: relax.Expr) -> list:
    if not isinstance(data.ty.shape, relax.ShapeExpr):
        raise Refused(
            "the shape of its operand is unknown; give the extents of the inputs: shapes={...}"
        )
    return [
        int(extent) if isinstance(extent, tirx.IntImm) else extent
        for extent in data.ty.shape.values
    ]


def _text(attrs: Attrs, name: str, default: str) -> str:
    value = attrs.get(name, default)
    return value.decode() if isinstance(value, bytes) else value


def _constant(value: object, what: str) -> Any:
    """Return the value of an operand that must be a constant; None if it is left out."""
    if value is None:
        return None
    if isinstance(value, relax.ShapeExpr):
        known = all(isinstance(extent, tirx.IntImm) for extent in value.values)
        array = np.array([int(extent) for extent in value.values]) if known else None
    else:
        array = constant_value(value) if isinstance(value, relax.Expr) else None
    if array is None:
        raise Refused(
            f"its operand {what!r} is computed at run time; give the extents of the inputs, "
            "shapes={...}, or make it a constant"
        )
    return array


def _folds(inputs: Inputs) -> bool:
    """Tell whether TVM's converter can fold the call: all operands are constants, or one is no
    tensor."""
    operands = [operand for operand in inputs if operand is not None]
    return not all(map(_is_tensor, operands)) or all(
        constant_value(operand) is not None for operand in operands
    )


@_converts("Einsum")
def _einsum(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    return relax.op.einsum(relax.Tuple(list(inputs)), _text(attrs, "equation", "").replace(" ", ""))


@_converts("CumSum")
def _cumsum(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    if not attrs.get("reverse", 0):
        return None
    axis = int(_constant(inputs[1], "axis").item())
    flipped = bb.normalize(relax.op.flip(inputs[0], axis))
    total = relax.op.cumsum(flipped, axis, exclusive=bool(attrs.get("exclusive", 0)))
    return relax.op.flip(bb.normalize(total), axis)


@_converts("Elu")
def _elu(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    return _exponential_unit(bb, inputs[0], attrs.get("alpha", 1.0), 1.0)


@_converts("Selu")
def _selu(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    alpha = attrs.get("alpha", 1.67326319217681884765625)
    return _exponential_unit(bb, inputs[0], alpha, attrs.get("gamma", 1.05070102214813232421875))


def _exponential_unit(bb: Builder, data: relax.Expr, alpha: float, gamma: float) -> relax.Expr:
    """Return ``gamma * (x if x > 0 else alpha * (exp(x) - 1))``, whose gradient does not
    overflow."""
    zero = _like(0, data)
    positive = bb.normalize(relax.op.greater(data, zero))
    exponent = bb.normalize(relax.op.where(positive, zero, data))
    curve = relax.op.multiply(
        _like(gamma * alpha, data), relax.op.subtract(relax.op.exp(exponent), _like(1, data))
    )
    line = data if gamma == 1.0 else relax.op.multiply(_like(gamma, data), data)
    return relax.op.where(positive, line, curve)


@_converts("Celu")
def _celu(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """Return ``x if x > 0 else alpha * (exp(x / alpha) - 1)``, whose gradient does not overflow."""
    data, alpha = inputs[0], attrs.get("alpha", 1.0)
    zero = _like(0, data)
    positive = bb.normalize(relax.op.greater(data, zero))
    exponent = bb.normalize(relax.op.where(positive, zero, data))
    growth = relax.op.exp(relax.op.divide(exponent, _like(alpha, data)))
    curve = relax.op.multiply(_like(alpha, data), relax.op.subtract(growth, _like(1, data)))
    return relax.op.where(positive, data, curve)


@_converts("SoftmaxCrossEntropyLoss")
def _cross_entropy(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    scores, custom = inputs[0], attrs["tvm_custom"]
    logarithms = bb.emit(relax.op.nn.log_softmax(scores, 1))
    loss = _negative_likelihood(logarithms, inputs[1], inputs[2], attrs)
    return loss if custom["num_outputs"] < 2 else relax.Tuple([bb.normalize(loss), logarithms])


@_converts("NegativeLogLikelihoodLoss")
def _nll_loss(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    return _negative_likelihood(inputs[0], inputs[1], inputs[2], attrs)


def _negative_likelihood(
    logarithms: relax.Expr, targets: relax.Expr, weights: relax.Expr | None, attrs: Attrs
) -> relax.Expr:
    reduction = _text(attrs, "reduction", "mean")
    return relax.op.nn.nll_loss(
        logarithms, targets, weights, reduction, int(attrs.get("ignore_index", -100))
    )


def _float_dtype(attrs: Attrs, default: str) -> str:
    kind = attrs.get("dtype", 0)
    return str(onnx.helper.tensor_dtype_to_np_dtype(kind)) if kind else default


@_converts("Bernoulli")
def _bernoulli(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """Draw 1 with the probabilities of the operand, which get no gradient, and else 0."""
    data = inputs[0]
    seed, stream = attrs["tvm_custom"]["draw"]()
    hit = random.bernoulli(bb, seed, stream, _extents(data), data)
    return relax.op.astype(hit, _float_dtype(attrs, _dtype(data)))


@_converts("RandomNormal", "RandomNormalLike")
def _random_normal(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    shape, dtype = _drawn(inputs, attrs)
    seed, stream = attrs["tvm_custom"]["draw"]()
    drawn = random.normal(bb, seed, stream, shape, dtype)
    drawn = bb.emit(relax.op.multiply(drawn, relax.const(attrs.get("scale", 1.0), dtype)))
    return relax.op.add(drawn, relax.const(attrs.get("mean", 0.0), dtype))


@_converts("RandomUniform", "RandomUniformLike")
def _random_uniform(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    shape, dtype = _drawn(inputs, attrs)
    low, high = attrs.get("low", 0.0), attrs.get("high", 1.0)
    seed, stream = attrs["tvm_custom"]["draw"]()
    return random.uniform(bb, seed, stream, shape, dtype, low=low, high=high)


def _drawn(inputs: Inputs, attrs: Attrs) -> tuple[list, str]:
    """Return the shape and the dtype of random numbers."""
    if len(inputs) and inputs[0] is not None:
        return _extents(inputs[0]), _float_dtype(attrs, _dtype(inputs[0]))
    return list(attrs["shape"]), _float_dtype(attrs, "float32")


@_converts("Mish")
def _mish(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """Return ``x tanh(softplus(x))`` with the stable form of softplus."""
    data = inputs[0]
    small = relax.op.log(
        relax.op.add(_like(1, data), relax.op.exp(relax.op.negative(relax.op.abs(data))))
    )
    softplus = relax.op.add(relax.op.maximum(data, _like(0, data)), small)
    return relax.op.multiply(data, relax.op.tanh(softplus))


@_converts("ThresholdedRelu")
def _thresholded_relu(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    data = inputs[0]
    above = relax.op.greater(data, _like(attrs.get("alpha", 1.0), data))
    return relax.op.where(above, data, _like(0, data))


def _pairwise(function: Callable) -> Converter:
    """Return the converter of a function of two operands, of which an operator takes any number;
    ``function`` takes the builder too."""

    def convert(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
        if len(inputs) < 2 or _folds(inputs):
            return inputs[0] if len(inputs) == 1 else None
        result = inputs[0]
        for operand in inputs[1:]:
            result = bb.normalize(function(bb, result, operand))
        return result

    return convert


CONVERTERS["Sum"] = _pairwise(lambda _, first, second: relax.op.add(first, second))


@_converts("Mean")
def _mean(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    total = CONVERTERS["Sum"](bb, inputs, attrs, opset)
    return None if total is None else relax.op.divide(total, _like(len(inputs), inputs[0]))


@_converts("Pow")
def _pow(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """The exponent may have another dtype than the base."""
    base, exponent = inputs[:2]
    if _folds([base, exponent]):
        return None
    if not _is_float(base) and not _is_float(exponent):
        raise Refused("TVM computes powers of floating-point numbers only; cast the base")
    if _dtype(base) == _dtype(exponent):
        return None
    if _is_float(base):
        value = constant_value(exponent)
        if value is not None:
            exponent = relax.const(value, _dtype(base))
        else:
            exponent = relax.op.astype(exponent, _dtype(base))
        return relax.op.power(base, exponent)
    power = relax.op.power(relax.op.astype(base, _dtype(exponent)), exponent)
    return relax.op.astype(power, _dtype(base))


@_converts("Softmax", "LogSoftmax")
def _softmax(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """Before version 13, the result is normalised over all axes from ``axis`` on."""
    data = inputs[0]
    rank = _rank(data)
    if opset >= 13 or attrs.get("axis", 1) % rank == rank - 1:
        return None
    if not all(isinstance(extent, int) for extent in _extents(data)):
        raise Refused(
            "it joins several axes, whose extents must be known: shapes={...}; or export for "
            "version 13 or later"
        )
    return None


@_converts("Dropout")
def _dropout(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """In training mode, random elements are 0. In inference, the identity and a mask of ones.

    The attribute ``seed`` of a node is ignored: all nodes draw with the seed of the function.
    """
    data, custom = inputs[0], attrs["tvm_custom"]
    kind = "bool" if opset >= 10 else _dtype(data)
    if opset >= 12:
        training = False if inputs[2] is None else constant_value(inputs[2])
        if training is None:
            raise Refused("its training_mode is computed at run time; make it a constant")
        rate = 0.5 if inputs[1] is None else float(_constant(inputs[1], "ratio"))
        if training and rate > 0:
            if not 0 < rate < 1:
                raise Refused(f"its ratio must be from 0 to less than 1, but it is {rate:g}")
            _extents(data)  # refuses an unknown shape
            seed, stream = custom["draw"]()
            result, mask = random.dropout(bb, seed, stream, data, rate)
            return result if custom["num_outputs"] < 2 else relax.Tuple([result, mask])
    elif opset < 7 and not attrs.get("is_test", 0):
        raise Refused(
            "it is in training mode (is_test=0), whose scale ONNX defines from version 12 on; "
            "import the model with dropout=False to train without dropout, or export it for "
            "version 12 or later"
        )
    if custom["num_outputs"] < 2:
        return data
    return relax.Tuple([data, bb.normalize(relax.op.ones_like(data, kind))])


@_converts("OptionalHasElement")
def _has_element(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """Without an operand, there is no element."""
    return None if len(inputs) else relax.const(False, "bool")


@_converts("IsInf")
def _is_inf(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    data = inputs[0]
    if attrs.get("detect_negative", 1) and attrs.get("detect_positive", 1):
        return None
    if not attrs.get("detect_negative", 1) and not attrs.get("detect_positive", 1):
        return relax.op.zeros_like(data, "bool")
    sign = 1 if attrs.get("detect_positive", 1) else -1
    return relax.op.equal(data, _like(sign * math.inf, data))


@_converts("RoiAlign")
def _roi_align(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    mode = _text(attrs, "mode", "avg")
    if mode != "avg":
        raise Refused(
            f"its attribute mode is {mode!r}; TVM's maximum differs from ONNX's: export it with "
            "mode='avg'"
        )
    return None


@_converts("SpaceToDepth")
def _space_to_depth(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """The order CRD of the channels, which version 28 has: the data's come first."""
    mode = _text(attrs, "mode", "DCR")
    if mode not in ("DCR", "CRD"):
        raise Refused(f"its attribute mode is {mode!r}; it must be 'DCR' or 'CRD'")
    if mode == "DCR":
        return None
    (batch, channels, height, width), size = _extents(inputs[0]), attrs["blocksize"]
    rows, columns = height // size, width // size
    blocks = [batch, channels, rows, size, columns, size]
    parts = bb.emit(relax.op.reshape(inputs[0], relax.ShapeExpr(blocks)))
    parts = bb.emit(relax.op.permute_dims(parts, [0, 1, 3, 5, 2, 4]))
    shape = [batch, channels * size * size, rows, columns]
    return relax.op.reshape(parts, relax.ShapeExpr(shape))


@_converts("DynamicQuantizeLinear")
def _dynamic_quantize(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """Return the integers of data, their scale and zero; neither has a gradient."""
    data = bb.emit(stop_gradient(inputs[0]))
    zero, most = _like(0, data), _like(255, data)
    high = bb.emit(relax.op.maximum(relax.op.max(data), zero))
    low = bb.emit(relax.op.minimum(relax.op.min(data), zero))
    scale = bb.emit(relax.op.divide(relax.op.subtract(high, low), most))
    scale = bb.emit(relax.op.where(relax.op.greater(scale, zero), scale, _like(1, data)))
    start = bb.emit(
        relax.op.clip(relax.op.round(relax.op.divide(relax.op.negative(low), scale)), 0, 255)
    )
    steps = bb.emit(relax.op.add(relax.op.round(relax.op.divide(data, scale)), start))
    result = relax.op.astype(bb.emit(relax.op.clip(steps, 0, 255)), "uint8")
    return relax.Tuple([bb.emit(result), scale, bb.emit(relax.op.astype(start, "uint8"))])
