"""Gradients of the backward operators of convolution."""

from __future__ import annotations

from tvm import relax

from ...op.conv import conv_attrs
from ...registry import register_gradient
from .._util import dtype_of, no_grad, shape_arg
from ..nn.conv import backward_builders, conv_like


@register_gradient("relax.grad.conv1d_backward_data")
@register_gradient("relax.grad.conv2d_backward_data")
@register_gradient("relax.grad.conv3d_backward_data")
def conv_backward_data(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of conv1d_backward_data, conv2d_backward_data and conv3d_backward_data.

    Forward form: ``dx = conv_backward_data(dy, x.shape, w)``.

    Backward form: ``[conv(dx_grad, w), no_grad, conv_backward_weight(dy, dx_grad, w.shape)]``.
    """
    dy, data_shape, weight = orig_call.args
    attrs = conv_attrs(orig_call)
    _, backward_weight = backward_builders(orig_call)
    return [
        conv_like(output_grad, weight, attrs, dy),
        no_grad(data_shape),
        backward_weight(dy, output_grad, shape_arg(weight), **attrs, out_dtype=dtype_of(weight)),
    ]


@register_gradient("relax.grad.conv1d_backward_weight")
@register_gradient("relax.grad.conv2d_backward_weight")
@register_gradient("relax.grad.conv3d_backward_weight")
def conv_backward_weight(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of conv1d_backward_weight, conv2d_backward_weight and conv3d_backward_weight.

    Forward form: ``dw = conv_backward_weight(dy, x, w.shape)``.

    Backward form: ``[conv(x, dw_grad), conv_backward_data(dy, x.shape, dw_grad), no_grad]``.
    """
    dy, data, weight_shape = orig_call.args
    attrs = conv_attrs(orig_call)
    backward_data, _ = backward_builders(orig_call)
    return [
        conv_like(data, output_grad, attrs, dy),
        backward_data(dy, shape_arg(data), output_grad, **attrs, out_dtype=dtype_of(data)),
        no_grad(weight_shape),
    ]
