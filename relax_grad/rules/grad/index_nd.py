"""Gradients of the backward operators of gather_nd and index_tensor.

Gathering and adding up transpose each other.
"""

from __future__ import annotations

from tvm.relax.op import grad as backward

from ...registry import register_gradient
from .._util import no_grad, shape_arg


@register_gradient("relax.grad.gather_nd_backward_data")
def gather_nd_backward_data(orig_var, orig_call, output_grad, ctx):
    """Gradient of gather_nd_backward_data.

    Forward form: ``ddata = gather_nd_backward_data(dy, data.shape, indices, batch_dims)``.

    Backward form: ``[gather_nd_jvp(ddata_grad, indices, batch_dims), no_grad, no_grad]``.
    """
    _, data_shape, indices = orig_call.args
    return [
        backward.gather_nd_jvp(output_grad, indices, int(orig_call.attrs.batch_dims)),
        no_grad(data_shape),
        no_grad(indices),
    ]


@register_gradient("relax.grad.gather_nd_jvp")
def gather_nd_jvp(orig_var, orig_call, output_grad, ctx):
    """Gradient of gather_nd_jvp.

    Forward form: ``y' = gather_nd_jvp(data', indices, batch_dims)``.

    Backward form: ``[gather_nd_backward_data(y'_grad, data'.shape, indices, batch_dims), no_grad]``.
    """
    direction, indices = orig_call.args
    return [
        backward.gather_nd_backward_data(
            output_grad, shape_arg(direction), indices, int(orig_call.attrs.batch_dims)
        ),
        no_grad(indices),
    ]


@register_gradient("relax.grad.index_tensor_backward_data")
def index_tensor_backward_data(orig_var, orig_call, output_grad, ctx):
    """Gradient of index_tensor_backward_data.

    Forward form: ``ddata = index_tensor_backward_data(dy, data.shape, indices)``.

    Backward form: ``[index_tensor_jvp(ddata_grad, indices), no_grad, no_grad]``.
    """
    _, data_shape, indices = orig_call.args
    return [
        backward.index_tensor_jvp(output_grad, indices),
        no_grad(data_shape),
        no_grad(indices),
    ]


@register_gradient("relax.grad.index_tensor_jvp")
def index_tensor_jvp(orig_var, orig_call, output_grad, ctx):
    """Gradient of index_tensor_jvp.

    Forward form: ``y' = index_tensor_jvp(data', indices)``.

    Backward form: ``[index_tensor_backward_data(y'_grad, data'.shape, indices), no_grad]``.
    """
    direction, indices = orig_call.args
    return [
        backward.index_tensor_backward_data(output_grad, shape_arg(direction), indices),
        no_grad(indices),
    ]
