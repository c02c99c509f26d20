"""Gradients of attention."""

from __future__ import annotations

from tvm import relax
from tvm.ir import Op

from ...op.attention import check_masks, gradients, shared_by
from ...registry import register_gradient
from .._util import cast_like, dtype_of, no_grad, shape_of, unbroadcast, wide_dtype, widen

_BACKWARD = Op.get("relax.grad.attention_backward")


@register_gradient("relax.nn.attention")
def attention(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of attention.

    Forward form, for each head: ``o = p @ v`` with ``p = softmax(scale * q @ k^T)`` over the keys
    that the causal mask and the window admit for a query.

    Backward form: ``attention_backward(o_grad, o, q, k, v)``. In half precision, the rounding error
    of ``o`` is too large for that: ``o`` is computed again, in float32.
    """
    return _partials(orig_var, orig_call, output_grad, ctx)


@register_gradient("relax.nn.attention_bias")
def attention_bias(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of attention_bias.

    Forward form: as :func:`attention` with ``p = softmax(scale * q @ k^T + bias)``.

    Backward form: ``attention_backward(o_grad, o, q, k, v, bias)``. For the bias, it is the
    gradient of the scores, summed over the axes along which the bias was broadcast: a tensor as
    large as the weights.
    """
    partials = _partials(orig_var, orig_call, output_grad, ctx)
    bias = orig_call.args[3]
    scores_grad = gradients(ctx, orig_call, _precise(orig_var), output_grad)[1]
    return [*partials, cast_like(ctx, unbroadcast(ctx, scores_grad, bias), bias)]


@register_gradient("relax.nn.attention_var_len")
def attention_var_len(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of attention_var_len.

    Forward form: as :func:`attention`, where a query attends to the keys of the same sequence.

    Backward form: the composition that is the legalization of ``attention_backward``.

    The weights of all pairs of queries and keys are computed, even across sequences: time and
    memory grow with the square of the total length.
    """
    partials, _ = gradients(ctx, orig_call, _precise(orig_var), output_grad)
    return [*partials, *map(no_grad, orig_call.args[3:])]


def _partials(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Return the partials of queries, keys and values."""
    query, *others = orig_call.args[:3]
    check_masks(orig_call)
    for tensor in others:
        shared_by(tensor, shape_of(query)[2], axis=2)
    output, operands = orig_var, list(orig_call.args)
    if _precise(orig_var) is None:
        operands = [ctx.emit(widen(operand)) for operand in operands]
        output = ctx.emit(relax.Call(orig_call.op, operands, orig_call.attrs))
        output_grad = ctx.emit(widen(output_grad))
    arguments = [output_grad, output, *operands]
    partials = ctx.emit(relax.Call(_BACKWARD, arguments, orig_call.attrs))
    return [cast_like(ctx, relax.TupleGetItem(partials, i), orig_call.args[i]) for i in range(3)]


def _precise(output: relax.Expr) -> relax.Expr | None:
    """Return the result of an attention, or None if it has half precision."""
    return output if dtype_of(output) == wide_dtype(output) else None
