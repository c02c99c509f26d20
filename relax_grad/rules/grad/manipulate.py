"""Gradients of the backward operators of the operators that move elements about."""

from __future__ import annotations

from tvm import relax

from ...registry import register_gradient
from .._util import no_grad


@register_gradient("relax.grad.tile_backward_data")
def tile_backward_data(orig_var, orig_call, output_grad, ctx):
    """Gradient of tile_backward_data.

    Forward form: ``dx = tile_backward_data(dy, x.shape, repeats)``.

    Backward form: ``[tile(dx_grad, repeats), no_grad]``.
    """
    _, data_shape = orig_call.args
    return [relax.op.tile(output_grad, orig_call.attrs.repeats), no_grad(data_shape)]


@register_gradient("relax.grad.repeat_backward_data")
def repeat_backward_data(orig_var, orig_call, output_grad, ctx):
    """Gradient of repeat_backward_data.

    Forward form: ``dx = repeat_backward_data(dy, x.shape, repeats, axis)``.

    Backward form: ``[repeat(dx_grad, repeats, axis), no_grad]``.
    """
    _, data_shape = orig_call.args
    attrs = orig_call.attrs
    return [relax.op.repeat(output_grad, attrs.repeats, attrs.axis), no_grad(data_shape)]


@register_gradient("relax.grad.concat_backward_tensors")
def concat_backward_tensors(orig_var, orig_call, output_grad, ctx):
    """Gradient of concat_backward_tensors.

    Forward form: ``dx1, dx2, ... = concat_backward_tensors(dy, (x1.shape, x2.shape, ...), axis)``.

    Backward form: ``[concat((dx1_grad, dx2_grad, ...), axis), no_grad]``.
    """
    _, shapes = orig_call.args
    return [relax.op.concat(output_grad, orig_call.attrs.axis), no_grad(shapes)]
