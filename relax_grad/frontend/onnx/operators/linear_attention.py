"""Linear attention of ONNX, and of ONNX Runtime, whose recurrence takes any number of steps."""

from __future__ import annotations

import math

from tvm import relax, te
from tvm.relax import op

from ....ir.dtypes import accumulation_dtype
from ....topi.linear_attention import linear_attention
from .converters import (
    Attrs,
    Builder,
    Inputs,
    Refused,
    Result,
    _converts,
    _dtype,
    _extents,
    _like,
    _rank,
    _text,
)

#: The update rules: whether the state decays, and whether the values are corrected.
_RULES = {
    "linear": (False, False),
    "gated": (True, False),
    "delta": (False, True),
    "gated_delta": (True, True),
}


@_converts("LinearAttention")
def _linear_attention(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """Half precision is computed in float32, as ONNX defines."""
    query, key, value, state, decay, rate = (inputs[i] for i in range(6))
    rule = _text(attrs, "update_rule", "gated_delta")
    if rule not in _RULES:
        raise Refused(
            f"its attribute update_rule is {rule!r}; it must be one of {', '.join(_RULES)}"
        )
    if attrs.get("state_window", 0):
        raise Refused(
            f"it has the attribute state_window={attrs['state_window']}, whose results are states "
            "for generation; export it without"
        )
    for name, operand, is_needed in zip(
        ("decay", "beta"), (decay, rate), _RULES[rule], strict=True
    ):
        if (operand is not None) != is_needed:
            raise Refused(
                f"its update_rule {rule!r} {'needs' if is_needed else 'has no'} operand {name}, "
                f"which is {'left out' if is_needed else 'there'}"
            )
    heads, groups = attrs.get("q_num_heads", 0), attrs.get("kv_num_heads", 0)
    if heads < 1 or groups < 1 or heads % groups:
        raise Refused(
            f"its attribute q_num_heads is {heads}, which must be a multiple of kv_num_heads, "
            f"{groups}"
        )
    dtype = _dtype(query)
    wide = accumulation_dtype(dtype)

    def widened(tensor: relax.Expr) -> relax.Expr:
        return tensor if _dtype(tensor) == wide else bb.emit(op.astype(tensor, wide))

    def in_heads(tensor: relax.Expr, count: int) -> relax.Expr:
        if _rank(tensor) != 3:
            raise Refused(f"its operand has {_rank(tensor)} axes; 3 are needed")
        batch, steps, width = _extents(tensor)
        return bb.emit(op.reshape(widened(tensor), [batch, steps, count, width // count]))

    query, key, value = (
        in_heads(tensor, count)
        for tensor, count in ((query, heads), (key, groups), (value, groups))
    )
    (batch, steps, _, size), width = _extents(query), _extents(value)[3]
    scale = attrs.get("scale", 0.0) or 1 / math.sqrt(size)
    query = bb.emit(op.multiply(query, _like(scale, query)))
    own = dtype if state is None else _dtype(state)
    if state is None:
        state = bb.emit(op.zeros(relax.ShapeExpr([batch, groups, size, width]), wide))
    operands = [query, key, value, widened(state)]
    if decay is not None:
        decay = in_heads(decay, groups)
        factors = bb.emit(op.exp(decay))
        operands.append(bb.emit(op.broadcast_to(factors, [batch, steps, groups, size])))
    if rate is not None:
        operands.append(bb.emit(op.broadcast_to(widened(rate), [batch, steps, groups])))

    def function(
        q: te.Tensor, k: te.Tensor, v: te.Tensor, s: te.Tensor, *others: te.Tensor
    ) -> list:
        factors = others[0] if decay is not None else None
        return linear_attention(q, k, v, s, factors, rate=others[-1] if rate is not None else None)

    results = bb.emit_te(function, *operands, primfunc_name_hint="linear_attention")
    result = bb.emit(relax.TupleGetItem(results, 0))
    result = bb.emit(op.reshape(result, [batch, steps, heads * width]))
    result = result if dtype == wide else bb.emit(op.astype(result, dtype))
    if attrs["tvm_custom"]["num_outputs"] < 2:
        return result
    states = bb.emit(relax.TupleGetItem(results, 1))
    last = bb.emit(op.strided_slice(states, [2], [steps - 1], [steps], [1]))
    # The sum removes the axis, whose extent is 1 by no analysis if the number of steps is symbolic.
    last = bb.emit(op.sum(last, [2]))
    return relax.Tuple([result, last if own == wide else bb.emit(op.astype(last, own))])
