"""Gradients of the backward operators of convolution."""

from __future__ import annotations

from tvm import relax
from tvm.relax.op import grad as backward
from tvm.relax.op.nn import conv2d

from ...registry import register_gradient
from .._util import dtype_of, no_grad, shape_arg
from ..nn.conv import conv_attrs


@register_gradient("relax.grad.conv2d_backward_data")
def conv2d_backward_data(orig_var, orig_call, output_grad, ctx):
    """Gradient of conv2d_backward_data.

    Forward form: ``dx = conv2d_backward_data(dy, x.shape, w)``.

    Backward form: ``[conv2d(dx_grad, w), no_grad, conv2d_backward_weight(dy, dx_grad, w.shape)]``.
    """
    dy, data_shape, weight = orig_call.args
    attrs = conv_attrs(orig_call)
    return [
        _conv2d_like(output_grad, weight, attrs, dy),
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
        _conv2d_like(data, output_grad, attrs, dy),
        backward.conv2d_backward_data(
            dy, shape_arg(data), output_grad, **attrs, out_dtype=dtype_of(data)
        ),
        no_grad(weight_shape),
    ]


def _conv2d_like(data: relax.Expr, weight: relax.Expr, attrs: dict, like: relax.Expr) -> relax.Expr:
    """Return ``conv2d(data, weight)`` in the layout and the dtype of ``like``.

    TVM compiles a convolution only where it returns the layout of its data, and accumulates in the
    dtype that it returns.
    """
    data_layout, out_layout = attrs["data_layout"], attrs["out_layout"]
    dtype = dtype_of(like)
    wide = "float32" if dtype in ("float16", "bfloat16") else dtype
    result = conv2d(data, weight, **{**attrs, "out_layout": data_layout}, out_dtype=wide)
    if out_layout != data_layout:
        result = relax.op.permute_dims(result, [data_layout.index(name) for name in out_layout])
    return result if wide == dtype else relax.op.astype(result, dtype)
