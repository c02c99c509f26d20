"""Gradients of selection and search."""

from __future__ import annotations

from tvm import relax

from ..registry import register_gradient
from ._util import no_grad, unbroadcast, zero


@register_gradient(
    "relax.where", corrects="leaves out the sum over the axes of a broadcast operand"
)
def where(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of where.

    Forward form: ``y = where(cond, x1, x2)``.

    Backward form: ``[no_grad, where(cond, y_grad, 0), where(cond, 0, y_grad)]``, each summed over
    the axes along which its operand was broadcast.
    """
    cond, x1, x2 = orig_call.args
    none = zero(output_grad)
    return [
        no_grad(cond),
        unbroadcast(ctx, relax.op.where(cond, output_grad, none), x1),
        unbroadcast(ctx, relax.op.where(cond, none, output_grad), x2),
    ]
