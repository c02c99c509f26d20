"""Gates and linear attention of ONNX Runtime's domain, as recent language models have them."""

from __future__ import annotations

from tvm import relax
from tvm.relax import op

from ..extents.values import is_symbolic
from .converters import (
    Attrs,
    Builder,
    Inputs,
    Refused,
    Result,
    _dtype,
    _extents,
    _like,
    _rank,
    _text,
)
from .fused import _converts, _split
from .linear_attention import _linear_attention
from .recent import causal_convolution, swish_of

_converts("LinearAttention")(_linear_attention)

#: Attributes of convolutions with a state for generation on GPUs, and the values without it.
_STATE_SETTINGS = {
    "ndim": 1,
    "state_update_capacity": 0,
    "state_channels_last": -1,
    "state_window": 0,
    "state_length": 0,
    "input_channel_offset": 0,
    "input_channels": 0,
}


@_converts("CausalConvWithState")
def _causal_conv(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """That of ONNX with a dilation; the channels may stand last."""
    for name, usual in _STATE_SETTINGS.items():
        if attrs.get(name, usual) != usual:
            raise Refused(
                f"it has the attribute {name}={attrs[name]}; {name}={usual} is supported: export "
                "it without"
            )
    data, weight, bias, state = (inputs[i] for i in range(4))
    is_last = attrs.get("channels_last", 0)
    if _rank(data) != 3:
        raise Refused(f"its operand has {_rank(data)} axes; 3 are supported: join the channels")
    if is_last:
        data, state = (
            None if tensor is None else bb.emit(op.permute_dims(tensor, [0, 2, 1]))
            for tensor in (data, state)
        )
    results = causal_convolution(
        bb, data, weight, bias, state, attrs=attrs, dilation=attrs.get("dilation", 1)
    )
    if is_last:
        results = [bb.emit(op.permute_dims(tensor, [0, 2, 1])) for tensor in results]
    return results[0] if len(results) == 1 else relax.Tuple(results)


@_converts("SwiGLU")
def _swiglu(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """Return ``g sigmoid(alpha g) (l + beta)`` of bounded halves, which one operand may hold."""
    gate, line = inputs[0], inputs[1]
    if line is None:
        gate, line = _split(bb, gate, 2, _rank(gate) - 1)
    limit = attrs.get("limit", 0.0)
    if limit > 0:
        gate = bb.emit(op.minimum(gate, _like(limit, gate)))
        line = bb.emit(op.clip(line, -limit, limit))
    gate = bb.emit(swish_of(bb, gate, attrs.get("activation_alpha", 1.0)))
    beta = attrs.get("activation_beta", 0.0)
    if beta:
        line = bb.emit(op.add(line, _like(beta, line)))
    return op.multiply(gate, line)


@_converts("GatedRMSNorm")
def _gated_norm(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """Normalise rows of the size of the scale by the root of their mean square, and multiply by a
    gate; half precision is computed in float32."""
    data, scale, gate = inputs[:3]
    dtype, extents, size = _dtype(data), _extents(data), _extents(scale)[0]
    kind = _text(attrs, "activation", "silu")
    if kind not in ("silu", "swish", "sigmoid"):
        raise Refused(
            f"its attribute activation is {kind!r}; it must be 'silu', 'swish' or 'sigmoid'"
        )
    if is_symbolic(extents[-1]) or is_symbolic(size):
        raise Refused(f"its operand has the extents {extents}; give the last one: shapes={{...}}")
    wide = "float32" if "16" in dtype else dtype
    data, scale, gate = (
        tensor if _dtype(tensor) == wide else bb.emit(op.astype(tensor, wide))
        for tensor in (data, scale, gate)
    )
    rows = bb.emit(op.reshape(data, [*extents[:-1], extents[-1] // size, size]))
    rows = bb.emit(op.nn.rms_norm(rows, scale, [-1], attrs.get("epsilon", 1e-5)))
    result = bb.emit(op.reshape(rows, extents))
    gate = bb.emit(op.sigmoid(gate) if kind == "sigmoid" else op.nn.silu(gate))
    result = op.multiply(result, gate)
    return result if wide == dtype else op.astype(bb.emit(result), dtype)


@_converts("LinearAttentionGate")
def _linear_attention_gate(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """Return the decay and the rate of linear attention: ``s softplus(a + b)``, and a sigmoid."""
    data, bias, scale, rate = (inputs[i] for i in range(4))
    dtype, wide = _dtype(data), _dtype(bias)
    total = data if dtype == wide else bb.emit(op.astype(data, wide))
    total = bb.emit(op.add(total, bias))
    decay = bb.emit(op.multiply(bb.emit(op.nn.softplus(total)), scale))
    decay = decay if dtype == wide else bb.emit(op.astype(decay, dtype))
    if attrs["tvm_custom"]["num_outputs"] < 2:
        return decay
    if rate is None:
        raise Refused("its result beta is used, and it has no operand b; give it")
    return relax.Tuple([decay, bb.emit(op.sigmoid(rate))])


@_converts("ScaledSiLU")
def _scaled_silu(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """Return the SiLU of a scaled operand."""
    data, scale = inputs[0], inputs[1]
    if scale is None:
        scale = _like(attrs.get("alpha", 1.0), data)
    elif _dtype(scale) != _dtype(data):
        scale = bb.emit(op.astype(scale, _dtype(data)))
    return op.nn.silu(bb.emit(op.multiply(data, scale)))


@_converts("GatedAdd")
def _gated_add(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """Return ``x + y g``; with a weight, the gate is the sigmoid of a product."""
    data, other, gate, weight = (inputs[i] for i in range(4))
    if weight is not None:
        gate = bb.emit(op.sigmoid(bb.emit(op.matmul(gate, weight))))
    return op.add(data, bb.emit(op.multiply(other, gate)))


@_converts("GatedRelativePositionBias")
def _gated_bias(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """Return biases of scores by distances, which gates of the queries multiply."""
    query, query_bias, distances, weight, bias, factor, offsets = (inputs[i] for i in range(7))
    if offsets is not None or _rank(query) != 3:
        raise Refused(
            "its queries are packed (token_offset); export the model without removed padding"
        )
    batch, steps, width = _extents(query)
    heads, columns = attrs["num_heads"], _extents(weight)[1]
    query = bb.emit(op.add(query, query_bias))
    query = bb.emit(op.reshape(query, [batch, steps, heads, width // heads]))
    query = bb.emit(op.permute_dims(query, [0, 2, 1, 3]))
    gates = bb.emit(op.add(bb.emit(op.matmul(query, weight)), bias))
    gates = bb.emit(op.reshape(gates, [batch, heads, steps, 2, columns // 2]))
    gates = bb.emit(op.sigmoid(bb.emit(op.sum(gates, [4]))))
    update, reset = _split(bb, gates, 2, 3)
    inner = bb.emit(op.subtract(bb.emit(op.multiply(reset, factor)), _like(1, factor)))
    share = bb.emit(op.add(bb.emit(op.multiply(update, inner)), _like(2, inner)))
    return op.multiply(share, distances)
