"""Operators of ONNX Runtime, with which its optimizer replaces several of ONNX's.

A key of :data:`FUSED` is a name in the domain ``com.microsoft``, or the name of an operator without
a domain that ONNX does not define.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx
from tvm import relax
from tvm.relax import op
from tvm.relax.frontend.onnx import onnx_frontend

from ....op import stop_gradient
from .converters import (
    CONVERTERS,
    Attrs,
    Builder,
    Converter,
    Inputs,
    Refused,
    Result,
    _dtype,
    _extents,
    _like,
    _rank,
    _text,
)
from .extremes import clipped, rectified

#: The domains of ONNX Runtime's operators, and of this package's.
DOMAIN, OWN_DOMAIN = "com.microsoft", "relax_grad"

FUSED: dict[str, Converter] = {}


def in_domain(node: onnx.NodeProto) -> bool:
    """Tell whether a node is one of ONNX Runtime's operators, or of this package's."""
    return node.domain in (DOMAIN, OWN_DOMAIN) or node.op_type == "SimplifiedLayerNormalization"


def _converts(*names: str) -> Callable[[Converter], Converter]:
    def enter(function: Converter) -> Converter:
        FUSED.update(dict.fromkeys(names, function))
        return function

    return enter


def _converted(kind: str, bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> relax.Expr:
    """Return the result of one of ONNX's operators."""
    operands = onnx_frontend.onnx_input(inputs)
    result = None
    if kind in CONVERTERS:
        result = CONVERTERS[kind](bb, operands, attrs, opset)
    if result is None:
        converter = onnx_frontend._get_convert_map()[kind].get_converter(opset)
        result = converter(bb, operands, attrs, [{}, {}])
    return bb.normalize(result)


def _activated(bb: Builder, data: relax.Expr, name: str, values: Sequence[float]) -> relax.Expr:
    """Return an activation of data; ``values`` are its parameters, which may be left out at the
    end."""
    slope = values[0] if values else None
    if name == "Relu":
        return rectified(bb, data)
    if name == "Sigmoid":
        return op.sigmoid(data)
    if name == "Tanh":
        return op.tanh(data)
    if name == "LeakyRelu":
        return op.nn.leakyrelu(data, 0.01 if slope is None else slope)
    if name == "Clip" and len(values) > 1:
        return clipped(bb, data, *(_like(value, data) for value in values[:2]))
    if name == "HardSigmoid":
        alpha, beta = [*values[:2], 0.2, 0.5][:2] if len(values) > 1 else (slope or 0.2, 0.5)
        line = op.add(op.multiply(data, _like(alpha, data)), _like(beta, data))
        return clipped(bb, bb.normalize(line), _like(0, data), _like(1, data))
    if name == "Elu":
        return CONVERTERS["Elu"](bb, [data], {"alpha": 1.0 if slope is None else slope}, 6)
    raise Refused(
        f"its attribute activation is {name!r}; supported are Relu, Sigmoid, Tanh, LeakyRelu, "
        "Clip with two bounds, HardSigmoid and Elu: optimise the model without this fusion"
    )


def _swapped(data: relax.Expr) -> relax.Expr:
    """Return a tensor with its last two axes swapped."""
    rank = _rank(data)
    return op.permute_dims(data, [*range(rank - 2), rank - 1, rank - 2])


def _batches_first(data: relax.Expr) -> relax.Expr:
    """Return a tensor with its first axis before the last one."""
    rank = _rank(data)
    return op.permute_dims(data, [*range(1, rank - 1), 0, rank - 1])


@_converts("FusedMatMul")
def _fused_matmul(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """Return ``alpha * A B``, of which each operand may be transposed; the first axis may stand
    after the batches."""
    a, b = inputs[:2]
    a = bb.normalize(_batches_first(a)) if attrs.get("transBatchA", 0) and _rank(a) > 2 else a
    b = bb.normalize(_batches_first(b)) if attrs.get("transBatchB", 0) and _rank(b) > 2 else b
    a = bb.normalize(_swapped(a)) if attrs.get("transA", 0) and _rank(a) > 1 else a
    b = bb.normalize(_swapped(b)) if attrs.get("transB", 0) and _rank(b) > 1 else b
    product, alpha = bb.normalize(op.matmul(a, b)), attrs.get("alpha", 1.0)
    return product if alpha == 1.0 else op.multiply(product, _like(alpha, product))


@_converts("FusedMatMulActivation")
def _fused_matmul_activation(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    product = bb.normalize(_fused_matmul(bb, inputs, attrs, opset))
    names = ("activation_alpha", "activation_beta", "activation_gamma")
    values = [attrs[name] for name in names if name in attrs]
    return _activated(bb, product, _text(attrs, "activation", ""), values)


@_converts("FusedGemm")
def _fused_gemm(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    result = _converted("Gemm", bb, inputs, attrs, opset)
    names = ("activation_alpha", "activation_beta", "activation_gamma")
    values = [attrs[name] for name in names if name in attrs]
    return _activated(bb, result, _text(attrs, "activation", ""), values)


@_converts("FusedConv")
def _fused_conv(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """Return the activation of ``conv(X, W) + B + Z``."""
    result = _converted("Conv", bb, inputs[:3], attrs, opset)
    if inputs[3] is not None:
        result = bb.normalize(op.add(result, inputs[3]))
    name = _text(attrs, "activation", "")
    if not name:
        return result
    return _activated(bb, result, name, list(attrs.get("activation_params", ())))


@_converts("QuickGelu")
def _quick_gelu(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """Return ``x sigmoid(alpha x)``."""
    data = inputs[0]
    scaled = op.multiply(data, _like(attrs.get("alpha", 1.702), data))
    return op.multiply(data, op.sigmoid(scaled))


@_converts("Gelu")
def _gelu(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    return op.nn.gelu(inputs[0])


@_converts("BiasGelu")
def _bias_gelu(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    return op.nn.gelu(bb.normalize(op.add(inputs[0], inputs[1])))


@_converts("FastGelu")
def _fast_gelu(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    data = inputs[0]
    if inputs[1] is not None:
        data = bb.normalize(op.add(data, inputs[1]))
    return op.nn.gelu_tanh(data)


def _sum_of(bb: Builder, *operands: relax.Expr | None) -> relax.Expr:
    total = None
    for operand in operands:
        if operand is not None:
            total = operand if total is None else bb.emit(op.add(total, operand))
    return total


@_converts("SkipLayerNormalization")
def _skip_layer_norm(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """Return the normalised sum of the data, the skipped data and a bias; its mean and root; and
    the sum."""
    data, skip, gamma, beta, bias = (inputs[i] for i in range(5))
    total, epsilon = _sum_of(bb, data, skip, bias), attrs.get("epsilon", 1e-12)
    attributes = {"axis": -1, "epsilon": epsilon, "tvm_custom": attrs["tvm_custom"]}
    result = CONVERTERS["LayerNormalization"](bb, [total, gamma, beta], attributes, opset)
    fields = list(result.fields) if isinstance(result, relax.Tuple) else [bb.normalize(result)]
    return fields[0] if len(fields) == 1 else relax.Tuple([*fields, total])


def _rms(
    bb: Builder, data: relax.Expr, scale: relax.Expr, axis: int, epsilon: float, num_outputs: int
) -> list[relax.Expr]:
    """Return the data divided by its root mean square, times the scale; and the inverse root where
    it is asked for."""
    rank = _rank(data)
    axes = list(range(axis % rank, rank))
    if _rank(scale) != len(axes):
        scale = bb.normalize(op.reshape(scale, _extents(data)[axes[0] :]))
    results = [bb.normalize(op.nn.rms_norm(data, scale, axes, epsilon))]
    if num_outputs > 1:
        single = bb.normalize(op.astype(data, "float32")) if "16" in _dtype(data) else data
        mean = bb.normalize(op.mean(op.multiply(single, single), axes, keepdims=True))
        results.append(bb.normalize(op.rsqrt(bb.normalize(op.add(mean, _like(epsilon, mean))))))
    return results


@_converts("SimplifiedLayerNormalization")
def _simplified_layer_norm(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    count = attrs["tvm_custom"]["num_outputs"]
    epsilon = attrs.get("epsilon", 1e-5)
    results = _rms(bb, inputs[0], inputs[1], attrs.get("axis", -1), epsilon, num_outputs=count)
    return results[0] if len(results) == 1 else relax.Tuple(results)


@_converts("SkipSimplifiedLayerNormalization")
def _skip_simplified_layer_norm(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    data, skip, gamma, bias = (inputs[i] for i in range(4))
    total, count = _sum_of(bb, data, skip, bias), attrs["tvm_custom"]["num_outputs"]
    results = _rms(bb, total, gamma, -1, attrs.get("epsilon", 1e-12), num_outputs=count)
    if len(results) == 1:
        return results[0]
    # The mean, the second result, has no meaning here, and is unused.
    return relax.Tuple([results[0], results[1], results[1], total])


@_converts("RotaryEmbedding")
def _rotary_embedding(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """Turn pairs of elements by angles, whose cosines and sines stand in tables by positions."""
    data, positions, cosines, sines = inputs[:4]
    for name, usual in (("is_packed_batching", 0), ("scale", 1.0)):
        if attrs.get(name, usual) != usual:
            raise Refused(
                f"its attribute {name} is {attrs[name]:g}; {usual:g} is supported: export it "
                "without"
            )
    is_flat, extents = _rank(data) == 3, _extents(data)
    half = _extents(cosines)[1]
    width = attrs.get("rotary_embedding_dim", 0) or 2 * half
    if is_flat:
        batch, steps, hidden = extents
        heads = attrs.get("num_heads", 0)
        if attrs.get("rotary_embedding_dim", 0) and not heads:
            raise Refused(
                f"its attribute rotary_embedding_dim is {attrs['rotary_embedding_dim']}, and it "
                "has no num_heads; give the number of heads"
            )
        heads = heads or hidden // (2 * half)
        size = hidden // heads
        data = bb.emit(op.reshape(data, [batch, steps, heads, size]))
    else:
        batch, heads, steps, size = extents
        data = bb.emit(op.permute_dims(data, [0, 2, 1, 3]))
    if _rank(positions) == 1:  # the position of the first step
        offsets = bb.emit(op.arange(0, steps, 1, "int64"))
        positions = bb.emit(op.expand_dims(op.add(positions, offsets), 0))

    def factors(table: relax.Expr) -> relax.Expr:
        rows = bb.emit(op.take(table, positions, 0, "nan"))
        return bb.emit(op.expand_dims(rows, 2))

    cosines, sines = factors(cosines), factors(sines)
    parts = [data] if width == size else _split(bb, data, [width], 3)
    turned, rest = parts[0], parts[1:]
    if attrs.get("interleaved", 0):
        pairs = bb.emit(op.reshape(turned, [batch, steps, heads, half, 2]))
        real, imaginary = (bb.emit(op.squeeze(part, [4])) for part in _split(bb, pairs, 2, 4))
    else:
        real, imaginary = _split(bb, turned, 2, 3)
    first = bb.emit(op.subtract(op.multiply(real, cosines), op.multiply(imaginary, sines)))
    second = bb.emit(op.add(op.multiply(imaginary, cosines), op.multiply(real, sines)))
    if attrs.get("interleaved", 0):
        result = bb.emit(op.stack([first, second], 4))
        result = bb.emit(op.reshape(result, [batch, steps, heads, width]))
    else:
        result = bb.emit(op.concat([first, second], 3))
    if rest:
        result = bb.emit(op.concat([result, *rest], 3))
    if is_flat:
        return op.reshape(result, extents)
    return op.permute_dims(result, [0, 2, 1, 3])


@_converts("FakeQuantize")
def _fake_quantize(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """Round to multiples of a scale within a range; the gradient is as in
    ``torch.fake_quantize_per_tensor_affine``."""
    data, scale, zero = inputs[:3]
    low, high = (_like(attrs[name], data) for name in ("low", "high"))

    def along_axis(value: relax.Expr) -> relax.Expr:
        value = value if _dtype(value) == _dtype(data) else op.astype(value, _dtype(data))
        value = bb.normalize(value)
        if _rank(value) == 0 or _extents(value) == [1]:
            return bb.emit(op.reshape(value, ()))
        shape = [1] * _rank(data)
        shape[attrs["axis"] % _rank(data)] = _extents(value)[0]
        return bb.emit(op.reshape(value, shape))

    scale = along_axis(scale)
    zero = _like(0, data) if zero is None else along_axis(zero)
    steps = bb.emit(op.add(op.round(op.divide(data, scale)), zero))
    kept = op.logical_and(op.greater_equal(steps, low), op.less_equal(steps, high))
    straight = bb.emit(op.where(kept, data, _like(0, data)))
    steps = bb.emit(op.minimum(op.maximum(steps, low), high))
    result = bb.emit(op.multiply(op.subtract(steps, zero), scale))
    return op.add(straight, stop_gradient(bb.normalize(op.subtract(result, straight))))


def _split(
    bb: Builder, data: relax.Expr, indices_or_count: int | list[int], axis: int
) -> list[relax.Expr]:
    parts = bb.emit(op.split(data, indices_or_count, axis))
    return [bb.emit(relax.TupleGetItem(parts, i)) for i in range(len(parts.ty.fields))]
