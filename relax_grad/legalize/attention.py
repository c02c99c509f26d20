"""Legalization of attention, which replaces TVM's wrong one, and of its weights."""

from __future__ import annotations

from tvm import relax, tirx
from tvm.ir import Op
from tvm.relax import op

from ..ir.compat import Analyzer, dtype_of
from ..op.attention import for_heads, forward_of, gradients, take_apart
from ..op.attention_dropout import ATTENTION_DROPOUT
from ..registry import register_legalize
from ..topi import attention as topi_attention
from ..topi import util as topi_util
from ._gpu import bind_threads
from ._util import stock, zero_where_empty, zeros

_STOCK_ATTENTION = stock("relax.nn.attention")


@register_legalize(
    "relax.nn.attention",
    corrects=(
        "reads out of bounds where heads share keys, returns NaN where all unmasked scores are "
        "far below 0, refuses a window and a number of keys that is an expression, accumulates "
        "half precision in half precision, and is undefined without keys"
    ),
)
def _attention(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    query, key, value = call.args
    attrs, dtype, heads = call.attrs, dtype_of(query.ty), query.ty.shape.values[2]
    keys, size = key.ty.shape.values[1], query.ty.shape.values[3]
    if (
        all(topi_util.is_static(extent) or isinstance(extent, tirx.Var) for extent in (keys, size))
        and attrs.causal_mask is None
        and attrs.window_size is None
        and dtype in ("float32", "float64")
        and all(dtype_of(other.ty) == dtype for other in (key, value))
        and all(Analyzer().can_prove_equal(o.ty.shape.values[2], heads) for o in (key, value))
    ):
        if topi_util.is_empty([keys]):
            return zeros(bb, call)
        attended = bind_threads(bb, _STOCK_ATTENTION(bb, call), always=False)
        return attended if topi_util.is_static(keys) else zero_where_empty(bb, attended, [keys])
    return _compute(bb, call)


@register_legalize(
    "relax.nn.attention_bias",
    corrects=(
        "as for attention, and returns NaN for a query whose keys are all masked by a bias of "
        "minus infinity"
    ),
)
def _attention_bias(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return _compute(bb, call)


@register_legalize("relax.nn.attention_var_len", corrects="is not legalized at all")
def _attention_var_len(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return _compute(bb, call)


@register_legalize("relax.grad.attention_dropout")
def _attention_dropout(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return _compute(bb, call)


@register_legalize("relax.grad.attention_dropout_backward")
def _attention_dropout_backward(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    output_grad, output, *operands = call.args
    forward = relax.Call(Op.get(ATTENTION_DROPOUT), operands, call.attrs)
    partials, _ = gradients(bb, forward, output, output_grad)
    return relax.Tuple([bb.emit(partial) for partial in partials])


@register_legalize("relax.grad.attention_backward")
def _attention_backward(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    output_grad, output = call.args[:2]
    partials, _ = gradients(bb, forward_of(call), output, output_grad)
    return relax.Tuple([bb.emit(partial) for partial in partials])


@register_legalize("relax.grad.attention_weights")
def _attention_weights(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    scores, *seqstarts = call.args
    window_size = call.attrs.window_size
    return bb.call_te(
        topi_attention.attention_weights,
        scores,
        seqstarts,
        call.attrs.causal_mask,
        None if window_size is None else int(window_size),
        primfunc_name_hint="attention_weights",
    )


def _compute(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Compute attention from its weights and values, in float32 at least."""
    parts = take_apart(bb, call)
    values = for_heads(bb, parts.value, call.args[0].ty.shape.values[2])
    weights = parts.dropped(bb, parts.weights)
    result = bb.emit(op.matmul(weights, bb.emit(op.permute_dims(values, [0, 1, 3, 2]))))
    result = bb.emit(op.permute_dims(result, [0, 2, 1, 3]))
    dtype = dtype_of(call.ty)
    return result if dtype_of(result.ty) == dtype else op.astype(result, dtype)
