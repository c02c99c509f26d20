"""Gradients of the backward operators of reductions."""

from __future__ import annotations

from tvm.relax import op

from .._linear import register_linear

register_linear(
    "mean_backward_x",
    "dx = mean_backward_x(dy, x.shape, axis, keepdims)",
    "mean(dx_grad, axis, keepdims)",
    lambda grad, call: op.mean(grad, call.attrs.axis, call.attrs.keepdims),
    accumulates=True,
)
