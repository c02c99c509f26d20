"""Gradients of the backward operators of linear algebra."""

from __future__ import annotations

from tvm import relax

from ...registry import register_gradient
from .._util import no_grad


@register_gradient("relax.grad.einsum_backward_operand")
def einsum_backward_operand(orig_var, orig_call, output_grad, ctx):
    """Gradient of einsum_backward_operand.

    Forward form: ``dx = einsum_backward_operand(dy, x.shape, subscripts)``.

    Backward form: ``[einsum((dx_grad,), subscripts), no_grad]``.
    """
    _, operand_shape = orig_call.args
    return [
        relax.op.einsum((output_grad,), str(orig_call.attrs.subscripts)),
        no_grad(operand_shape),
    ]
