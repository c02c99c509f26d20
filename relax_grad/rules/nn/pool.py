"""Gradients of pooling."""

from __future__ import annotations

from tvm import relax
from tvm.relax.op import grad as backward

from ...op.pool import check_pool2d_attrs
from ...registry import register_gradient


@register_gradient(
    "relax.nn.max_pool2d",
    corrects="lets a layout with packed channels through, which fails without naming the binding",
)
def max_pool2d(orig_var, orig_call, output_grad, ctx):
    """Gradient of max_pool2d.

    Forward form: ``y[o] = max over t of x[o * stride + t * dilation - padding]``.

    Backward form: ``[max_pool2d_backward(y_grad, x)]``: each window's gradient goes to the first of its
    largest elements.
    """
    (data,) = orig_call.args
    return [backward.max_pool2d_backward(output_grad, data, **pool2d_attrs(orig_call))]


@register_gradient(
    "relax.nn.avg_pool2d",
    corrects="lets a layout with packed channels through, which fails without naming the binding",
)
def avg_pool2d(orig_var, orig_call, output_grad, ctx):
    """Gradient of avg_pool2d.

    Forward form: ``y[o] = sum over t of x[o * stride + t * dilation - padding] / count[o]``.

    Backward form: ``[avg_pool2d_backward(y_grad, x)]``; of ``x``, only its shape is used.
    """
    (data,) = orig_call.args
    return [backward.avg_pool2d_backward(output_grad, data, **pool2d_attrs(orig_call))]


def pool2d_attrs(call: relax.Call) -> dict:
    """Return the attributes that a pooling and its backward operators have in common.

    Raises
    ------
    ValueError
        If no gradient is defined for them.
    """
    attrs = check_pool2d_attrs(call)
    return {
        "pool_size": attrs.pool_size,
        "strides": attrs.strides,
        "padding": attrs.padding,
        "dilation": attrs.dilation,
        "ceil_mode": attrs.ceil_mode,
        "count_include_pad": attrs.count_include_pad,
        "layout": attrs.layout,
        "out_layout": attrs.out_layout,
    }
