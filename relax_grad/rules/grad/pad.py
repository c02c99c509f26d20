"""Gradient of the backward operator of padding."""

from __future__ import annotations

from tvm.relax import op

from ...op.pad import pad_attrs
from .._linear import register_linear

register_linear(
    "pad_backward_data",
    "dx = pad_backward_data(dy, x.shape, pad_width, pad_mode)",
    "pad(dx_grad, pad_width, pad_mode, pad_value=0)",
    lambda grad, call: op.nn.pad(grad, **{**pad_attrs(call), "pad_value": 0.0}),
)
