"""Gradients of dropout."""

from __future__ import annotations

from tvm import relax

from ...registry import register_gradient


@register_gradient("relax.nn.dropout")
def dropout(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of dropout.

    Forward form: ``(y, mask) = dropout(x, rate)`` with ``y = x * mask``; the mask is a constant.

    Backward form: ``[y_grad * mask]``, with the mask that the forward returned.

    TVM computes dropout as the identity with a mask of ones, whatever the rate. The gradient then
    is the identity too. A custom implementation that scales the elements it keeps must return a
    mask with the scale: 0 or ``1 / (1 - rate)``. The rate alone does not tell which of the two
    implementations the forward function used.
    """
    mask = relax.TupleGetItem(orig_var, 1)
    return [relax.op.multiply(relax.TupleGetItem(output_grad, 0), mask)]
