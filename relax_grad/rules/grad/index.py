"""Gradients of the backward operators of indexing."""

from __future__ import annotations

from tvm import relax
from tvm.relax.op import grad as backward

from ...op.index import take_attrs
from ...registry import register_gradient
from .._linear import register_linear
from .._util import no_grad, shape_arg

register_linear(
    "take_backward",
    "dx = take_backward(dy, x, indices)",
    "take_jvp(dx_grad, indices)",
    lambda grad, call: backward.take_jvp(grad, call.args[2], **take_attrs(call)),
    note="Of x, only the shape is read.",
)
register_linear(
    "take_jvp",
    "y' = take_jvp(x', indices)",
    "take_backward(y'_grad, x', indices)",
    lambda grad, call: backward.take_backward(grad, *call.args, **take_attrs(call)),
)
register_linear(
    "gather_elements_backward_data",
    "ddata = gather_elements_backward_data(dy, data.shape, indices, axis)",
    "gather_elements_jvp(ddata_grad, indices, axis)",
    lambda grad, call: backward.gather_elements_jvp(grad, call.args[2], int(call.attrs.axis)),
)
register_linear(
    "gather_elements_jvp",
    "y' = gather_elements_jvp(data', indices, axis)",
    "gather_elements_backward_data(y'_grad, data'.shape, indices, axis)",
    lambda grad, call: backward.gather_elements_backward_data(
        grad, shape_arg(call.args[0]), call.args[1], int(call.attrs.axis)
    ),
)
register_linear(
    "strided_slice_backward_data",
    "dx = strided_slice_backward_data(dy, x.shape, axes, begin, end, strides)",
    "strided_slice(dx_grad, axes, begin, end, strides)",
    lambda grad, call: relax.op.strided_slice(grad, *call.args[2:], call.attrs.assume_inbound),
)


@register_gradient("relax.grad.dynamic_strided_slice_backward_data")
def dynamic_strided_slice_backward_data(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of dynamic_strided_slice_backward_data.

    Forward form: ``dx = dynamic_strided_slice_backward_data(dy, x.shape, begin, end, strides)``.

    Backward form: ``[dynamic_strided_slice(dx_grad, begin, end, strides), no_grad, ...]``.
    """
    dy, data_shape, *bounds = orig_call.args
    partial = relax.op.dynamic_strided_slice(output_grad, *bounds)
    if isinstance(dy.ty.shape, relax.ShapeExpr):
        # The shape of the slice is unknown, but the shape of dy is known.
        partial = ctx.match_cast(ctx.normalize(partial), dy.ty)
    return [partial, *map(no_grad, (data_shape, *bounds))]
