"""Gradients of the backward operators of gather_nd and index_tensor.

A gather and a scatter with addition are transposes of each other.
"""

from __future__ import annotations

from tvm.relax.op import grad as backward

from .._linear import register_linear
from .._util import shape_arg

register_linear(
    "gather_nd_backward_data",
    "ddata = gather_nd_backward_data(dy, data.shape, indices, batch_dims)",
    "gather_nd_jvp(ddata_grad, indices, batch_dims)",
    lambda grad, call: backward.gather_nd_jvp(grad, call.args[2], int(call.attrs.batch_dims)),
)
register_linear(
    "gather_nd_jvp",
    "y' = gather_nd_jvp(data', indices, batch_dims)",
    "gather_nd_backward_data(y'_grad, data'.shape, indices, batch_dims)",
    lambda grad, call: backward.gather_nd_backward_data(
        grad, shape_arg(call.args[0]), call.args[1], int(call.attrs.batch_dims)
    ),
)
register_linear(
    "index_tensor_backward_data",
    "ddata = index_tensor_backward_data(dy, data.shape, indices)",
    "index_tensor_jvp(ddata_grad, indices)",
    lambda grad, call: backward.index_tensor_jvp(grad, call.args[2]),
)
register_linear(
    "index_tensor_jvp",
    "y' = index_tensor_jvp(data', indices)",
    "index_tensor_backward_data(y'_grad, data'.shape, indices)",
    lambda grad, call: backward.index_tensor_backward_data(
        grad, shape_arg(call.args[0]), call.args[1]
    ),
)
