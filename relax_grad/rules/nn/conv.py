"""Gradients of the convolutions."""

from __future__ import annotations

from tvm import relax
from tvm.relax.op import grad as backward

from ...registry import register_gradient
from .._util import dtype_of, shape_arg


@register_gradient(
    "relax.nn.conv2d",
    corrects="refuses dilation with a stride, layouts other than NCHW/OIHW, out_dtype and symbolic "
    "extents, and copies the data to take the weight gradient of a grouped convolution",
)
def conv2d(orig_var, orig_call, output_grad, ctx):
    """Gradient of conv2d.

    Forward form: ``y = conv2d(x, w)``.

    Backward form: ``[conv2d_backward_data(y_grad, x.shape, w), conv2d_backward_weight(y_grad, x,
    w.shape)]``, each in the dtype of the argument that it belongs to.
    """
    data, weight = orig_call.args
    attrs = conv_attrs(orig_call)
    return [
        backward.conv2d_backward_data(
            output_grad, shape_arg(data), weight, **attrs, out_dtype=dtype_of(data)
        ),
        backward.conv2d_backward_weight(
            output_grad, data, shape_arg(weight), **attrs, out_dtype=dtype_of(weight)
        ),
    ]


def conv_attrs(call: relax.Call) -> dict:
    """Return the attributes that a convolution and its backward operators have in common."""
    attrs = call.attrs
    return {
        "strides": attrs.strides,
        "padding": attrs.padding,
        "dilation": attrs.dilation,
        "groups": attrs.groups,
        "data_layout": attrs.data_layout,
        "kernel_layout": attrs.kernel_layout,
        "out_layout": attrs.out_layout,
    }
