"""Gradients of the backward operators of indexing."""

from __future__ import annotations

from tvm import relax
from tvm.relax.op import grad as backward

from ...op.index import take_attrs
from ...registry import register_gradient
from .._util import no_grad, shape_arg


@register_gradient("relax.grad.take_backward")
def take_backward(orig_var, orig_call, output_grad, ctx):
    """Gradient of take_backward.

    Forward form: ``dx = take_backward(dy, x, indices)``, which reads only the shape of x.

    Backward form: ``[take_jvp(dx_grad, indices), no_grad, no_grad]``.
    """
    _, x, indices = orig_call.args
    return [
        backward.take_jvp(output_grad, indices, **take_attrs(orig_call)),
        no_grad(x),
        no_grad(indices),
    ]


@register_gradient("relax.grad.take_jvp")
def take_jvp(orig_var, orig_call, output_grad, ctx):
    """Gradient of take_jvp.

    Forward form: ``y' = take_jvp(x', indices)``.

    Backward form: ``[take_backward(y'_grad, x', indices), no_grad]``.
    """
    x_direction, indices = orig_call.args
    return [
        backward.take_backward(output_grad, x_direction, indices, **take_attrs(orig_call)),
        no_grad(indices),
    ]


@register_gradient("relax.grad.gather_elements_backward_data")
def gather_elements_backward_data(orig_var, orig_call, output_grad, ctx):
    """Gradient of gather_elements_backward_data.

    Forward form: ``ddata = gather_elements_backward_data(dy, data.shape, indices, axis)``.

    Backward form: ``[gather_elements_jvp(ddata_grad, indices, axis), no_grad, no_grad]``.
    """
    _, data_shape, indices = orig_call.args
    return [
        backward.gather_elements_jvp(output_grad, indices, int(orig_call.attrs.axis)),
        no_grad(data_shape),
        no_grad(indices),
    ]


@register_gradient("relax.grad.gather_elements_jvp")
def gather_elements_jvp(orig_var, orig_call, output_grad, ctx):
    """Gradient of gather_elements_jvp.

    Forward form: ``y' = gather_elements_jvp(data', indices, axis)``.

    Backward form: ``[gather_elements_backward_data(y'_grad, data'.shape, indices, axis), no_grad]``.
    """
    direction, indices = orig_call.args
    return [
        backward.gather_elements_backward_data(
            output_grad, shape_arg(direction), indices, int(orig_call.attrs.axis)
        ),
        no_grad(indices),
    ]


@register_gradient("relax.grad.strided_slice_backward_data")
def strided_slice_backward_data(orig_var, orig_call, output_grad, ctx):
    """Gradient of strided_slice_backward_data.

    Forward form: ``dx = strided_slice_backward_data(dy, x.shape, axes, begin, end, strides)``.

    Backward form: ``[strided_slice(dx_grad, axes, begin, end, strides), no_grad, ...]``.
    """
    bounds = orig_call.args[2:]
    return [
        relax.op.strided_slice(output_grad, *bounds, orig_call.attrs.assume_inbound),
        *map(no_grad, orig_call.args[1:]),
    ]


@register_gradient("relax.grad.dynamic_strided_slice_backward_data")
def dynamic_strided_slice_backward_data(orig_var, orig_call, output_grad, ctx):
    """Gradient of dynamic_strided_slice_backward_data.

    Forward form: ``dx = dynamic_strided_slice_backward_data(dy, x.shape, begin, end, strides)``.

    Backward form: ``[dynamic_strided_slice(dx_grad, begin, end, strides), no_grad, ...]``.
    """
    dy, data_shape, *bounds = orig_call.args
    partial = relax.op.dynamic_strided_slice(output_grad, *bounds)
    if isinstance(dy.ty.shape, relax.ShapeExpr):
        # The slice has no known shape, but dy has.
        partial = ctx.match_cast(ctx.normalize(partial), dy.ty)
    return [partial, *map(no_grad, (data_shape, *bounds))]
