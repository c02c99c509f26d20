"""Gradients of gather_nd and index_tensor."""

from __future__ import annotations

from tvm import relax
from tvm.relax.op import grad as backward

from ..registry import register_gradient
from ._util import no_grad, shape_arg


@register_gradient("relax.gather_nd")
def gather_nd(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of gather_nd.

    Forward form: ``y[b, p, ..] = data[b, indices[b, p, 0], indices[b, p,
    1], .., ..]`` with ``batch_dims`` axes ``b``.

    Backward form: ``[gather_nd_backward_data(y_grad, data.shape, indices, batch_dims), no_grad]``:
    each element of the data sums the gradients of its copies in y; an out-of-bounds index
    contributes nothing.
    """
    data, indices = orig_call.args
    return [
        backward.gather_nd_backward_data(
            output_grad, shape_arg(data), indices, int(orig_call.attrs.batch_dims)
        ),
        no_grad(indices),
    ]


@register_gradient("relax.index_tensor")
def index_tensor(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of index_tensor.

    Forward form: ``y = data[indices[0], indices[1], ..]`` with indices that are broadcast.

    Backward form: ``[index_tensor_backward_data(y_grad, data.shape, indices), no_grad]``.
    """
    data, indices = orig_call.args
    return [
        backward.index_tensor_backward_data(output_grad, shape_arg(data), indices),
        no_grad(indices),
    ]
