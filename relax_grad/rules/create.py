"""Gradients of the operators that create tensors."""

from __future__ import annotations

from tvm import relax

from ..registry import register_gradient
from ._util import cast_like, is_float, no_grad, unbroadcast, widen

_NO_FILL = "drops the gradient of fill_value"


@register_gradient("relax.full", corrects=_NO_FILL)
def full(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of full.

    Forward form: ``y = full(shape, fill_value, dtype)``.

    Backward form: ``[no_grad, sum(y_grad)]``, in the dtype of ``fill_value``.
    """
    shape, fill_value = orig_call.args
    return [no_grad(shape), _fill_value(ctx, orig_var, output_grad, fill_value)]


@register_gradient("relax.full_like", corrects=_NO_FILL)
def full_like(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of full_like.

    Forward form: ``y = full_like(x, fill_value, dtype)``.

    Backward form: ``[no_grad, sum(y_grad)]``, in the dtype of ``fill_value``.
    """
    x, fill_value = orig_call.args
    return [no_grad(x), _fill_value(ctx, orig_var, output_grad, fill_value)]


def _fill_value(
    ctx: relax.BlockBuilder, orig_var: relax.Var, output_grad: relax.Expr, fill_value: relax.Expr
) -> relax.Expr:
    if not (is_float(orig_var) and is_float(fill_value)):
        return no_grad(fill_value)
    total = unbroadcast(ctx, widen(output_grad), fill_value)
    return cast_like(ctx, total, fill_value)
