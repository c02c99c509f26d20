"""Gradients of the convolutions, for every number of spatial axes."""

from __future__ import annotations

from tvm import relax
from tvm.relax.op import grad as backward

from ...op.conv import conv_attrs
from ...op.rank import rank_of
from ...registry import register_gradient
from .._util import dtype_of, shape_arg, wide_dtype


@register_gradient("relax.nn.conv1d")
@register_gradient(
    "relax.nn.conv2d",
    corrects="refuses dilation with a stride, layouts other than NCHW/OIHW, out_dtype and symbolic "
    "extents, and copies the data to take the weight gradient of a grouped convolution",
)
@register_gradient("relax.nn.conv3d")
def conv(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of conv1d, conv2d and conv3d.

    Forward form: ``y = conv(x, w)``.

    Backward form: ``[conv_backward_data(y_grad, x.shape, w), conv_backward_weight(y_grad, x,
    w.shape)]``, each in the dtype of its argument.
    """
    data, weight = orig_call.args
    attrs = conv_attrs(orig_call)
    backward_data, backward_weight = backward_builders(orig_call)
    return [
        backward_data(output_grad, shape_arg(data), weight, **attrs, out_dtype=dtype_of(data)),
        backward_weight(output_grad, data, shape_arg(weight), **attrs, out_dtype=dtype_of(weight)),
    ]


@register_gradient("relax.nn.conv1d_transpose")
@register_gradient("relax.nn.conv2d_transpose")
@register_gradient("relax.nn.conv3d_transpose")
def conv_transpose(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of conv1d_transpose, conv2d_transpose and conv3d_transpose.

    Forward form: ``y = conv_transpose(x, w)``, which is ``conv_backward_data(x, y.shape, w)`` of
    the convolution that maps ``y`` to ``x``. Its weight is ``w`` with the names of the two channel
    axes exchanged.

    Backward form: ``[conv(y_grad, w), conv_backward_weight(x, y_grad, w.shape)]``.
    """
    data, weight = orig_call.args
    attrs = _conv_transposed(orig_call)
    _, backward_weight = backward_builders(orig_call)
    return [
        conv_like(output_grad, weight, attrs, data),
        backward_weight(data, output_grad, shape_arg(weight), **attrs, out_dtype=dtype_of(weight)),
    ]


def _conv_transposed(call: relax.Call) -> dict:
    """Return the attributes of the convolution whose transpose is the given call."""
    attrs = conv_attrs(call)
    rank = rank_of(call)
    padding = [int(size) for size in attrs["padding"]]
    for axis, size in enumerate(call.attrs.output_padding):
        # A positive output padding is the remainder that the convolution's stride skips. A negative
        # one crops the result, as more padding at the end does.
        padding[rank + axis] += max(-int(size), 0)
    return {
        **attrs,
        "padding": padding,
        "kernel_layout": attrs["kernel_layout"].translate(str.maketrans("IO", "OI")),
        "data_layout": attrs["out_layout"],
        "out_layout": attrs["data_layout"],
    }


def backward_builders(call: relax.Call) -> tuple:
    """Return the builders of the data and weight gradients for the rank of a call."""
    name = f"conv{rank_of(call)}d_backward"
    return getattr(backward, f"{name}_data"), getattr(backward, f"{name}_weight")


def conv_like(data: relax.Expr, weight: relax.Expr, attrs: dict, like: relax.Expr) -> relax.Expr:
    """Return the convolution of data with weight in the dtype of ``like``.

    TVM accumulates in the dtype of the result.
    """
    forward = getattr(relax.op.nn, f"conv{len(attrs['strides'])}d")
    dtype, wide = dtype_of(like), wide_dtype(like)
    result = forward(data, weight, **attrs, out_dtype=wide)
    return result if wide == dtype else relax.op.astype(result, dtype)
