"""Gradient of the backward operator of padding."""

from __future__ import annotations

from tvm import relax

from ...op.pad import pad_attrs
from ...registry import register_gradient
from .._util import no_grad


@register_gradient("relax.grad.pad_backward_data")
def pad_backward_data(orig_var, orig_call, output_grad, ctx):
    """Gradient of pad_backward_data.

    Forward form: ``dx = pad_backward_data(dy, x.shape, pad_width, pad_mode)``.

    Backward form: ``[pad(dx_grad, pad_width, pad_mode, pad_value=0), no_grad]``.
    """
    _, data_shape = orig_call.args
    attrs = {**pad_attrs(orig_call), "pad_value": 0.0}
    return [relax.op.nn.pad(output_grad, **attrs), no_grad(data_shape)]
