"""Gradients of the backward operators of linear algebra."""

from __future__ import annotations

from tvm.relax import op

from .._linear import register_linear

register_linear(
    "einsum_backward_operand",
    "dx = einsum_backward_operand(dy, x.shape, subscripts)",
    "einsum((dx_grad,), subscripts)",
    lambda grad, call: op.einsum((grad,), str(call.attrs.subscripts)),
)
