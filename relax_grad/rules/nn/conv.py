"""Gradients of the convolutions."""

from __future__ import annotations

from tvm import relax
from tvm.relax.op import grad as backward
from tvm.relax.op.nn import conv2d as forward

from ...registry import register_gradient
from .._util import dtype_of, shape_arg, wide_dtype


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


@register_gradient("relax.nn.conv2d_transpose")
def conv2d_transpose(orig_var, orig_call, output_grad, ctx):
    """Gradient of conv2d_transpose.

    Forward form: ``y = conv2d_transpose(x, w)``, which is ``conv2d_backward_data(x, y.shape, w)`` of the
    convolution that takes ``y`` to ``x``. Its weight is ``w`` with the names of the channel axes
    exchanged.

    Backward form: ``[conv2d(y_grad, w), conv2d_backward_weight(x, y_grad, w.shape)]``.
    """
    data, weight = orig_call.args
    attrs = _conv_transposed(orig_call)
    return [
        conv2d_like(output_grad, weight, attrs, data),
        backward.conv2d_backward_weight(
            data, output_grad, shape_arg(weight), **attrs, out_dtype=dtype_of(weight)
        ),
    ]


def _conv_transposed(call: relax.Call) -> dict:
    """Return the attributes of the convolution that a transposed convolution is the transpose of."""
    attrs = conv_attrs(call)
    rank = len(attrs["strides"])
    padding = [int(size) for size in attrs["padding"]]
    for axis, size in enumerate(call.attrs.output_padding):
        # A positive one is what the stride of the convolution leaves over; a negative one crops the
        # result, as more padding behind does.
        padding[rank + axis] += max(-int(size), 0)
    return {
        **attrs,
        "padding": padding,
        "kernel_layout": attrs["kernel_layout"].translate(str.maketrans("IO", "OI")),
        "data_layout": attrs["out_layout"],
        "out_layout": attrs["data_layout"],
    }


def conv2d_like(data: relax.Expr, weight: relax.Expr, attrs: dict, like: relax.Expr) -> relax.Expr:
    """Return ``conv2d(data, weight)`` in the layout and the dtype of ``like``.

    TVM compiles a convolution only where it returns the layout of its data, and accumulates in the
    dtype that it returns.
    """
    data_layout, out_layout = attrs["data_layout"], attrs["out_layout"]
    dtype = dtype_of(like)
    wide = wide_dtype(like)
    result = forward(data, weight, **{**attrs, "out_layout": data_layout}, out_dtype=wide)
    if out_layout != data_layout:
        result = relax.op.permute_dims(result, [data_layout.index(name) for name in out_layout])
    return result if wide == dtype else relax.op.astype(result, dtype)


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
