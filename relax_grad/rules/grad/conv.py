"""Gradients of the backward operators of convolution."""

from __future__ import annotations

from tvm.relax.op import grad as backward

from ...registry import register_gradient
from .._util import dtype_of, no_grad, shape_arg
from ..nn.conv import conv2d_like, conv_attrs


@register_gradient("relax.grad.conv2d_backward_data")
def conv2d_backward_data(orig_var, orig_call, output_grad, ctx):
    """Gradient of conv2d_backward_data.

    Forward form: ``dx = conv2d_backward_data(dy, x.shape, w)``.

    Backward form: ``[conv2d(dx_grad, w), no_grad, conv2d_backward_weight(dy, dx_grad, w.shape)]``.
    """
    dy, data_shape, weight = orig_call.args
    attrs = conv_attrs(orig_call)
    return [
        conv2d_like(output_grad, weight, attrs, dy),
        no_grad(data_shape),
        backward.conv2d_backward_weight(
            dy, output_grad, shape_arg(weight), **attrs, out_dtype=dtype_of(weight)
        ),
    ]


@register_gradient("relax.grad.conv2d_backward_weight")
def conv2d_backward_weight(orig_var, orig_call, output_grad, ctx):
    """Gradient of conv2d_backward_weight.

    Forward form: ``dw = conv2d_backward_weight(dy, x, w.shape)``.

    Backward form: ``[conv2d(x, dw_grad), conv2d_backward_data(dy, x.shape, dw_grad), no_grad]``.
    """
    dy, data, weight_shape = orig_call.args
    attrs = conv_attrs(orig_call)
    return [
        conv2d_like(data, output_grad, attrs, dy),
        backward.conv2d_backward_data(
            dy, shape_arg(data), output_grad, **attrs, out_dtype=dtype_of(data)
        ),
        no_grad(weight_shape),
    ]
