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


@register_gradient("relax.grad.split_backward_x")
def split_backward_x(orig_var, orig_call, output_grad, ctx):
    """Gradient of split_backward_x.

    Forward form: ``dx = split_backward_x((dy1, dy2, ...), x.shape, indices_or_sections, axis)``.

    Backward form: ``[split(dx_grad, indices_or_sections, axis), no_grad]``.
    """
    _, x_shape = orig_call.args
    attrs = orig_call.attrs
    return [
        relax.op.split(output_grad, attrs.indices_or_sections, int(attrs.axis)),
        no_grad(x_shape),
    ]


@register_gradient("relax.grad.stack_backward_tensors")
def stack_backward_tensors(orig_var, orig_call, output_grad, ctx):
    """Gradient of stack_backward_tensors.

    Forward form: ``dx1, dx2, ... = stack_backward_tensors(dy, axis)``.

    Backward form: ``[stack((dx1_grad, dx2_grad, ...), axis)]``.
    """
    return [relax.op.stack(output_grad, orig_call.attrs.axis)]


@register_gradient("relax.grad.layout_transform_backward_x")
def layout_transform_backward_x(orig_var, orig_call, output_grad, ctx):
    """Gradient of layout_transform_backward_x.

    Forward form: ``dx = layout_transform_backward_x(dy, x.shape, index_map)``.

    Backward form: ``[layout_transform(dx_grad, index_map, pad_value=0), no_grad]``.
    """
    _, x_shape = orig_call.args
    return [
        relax.op.layout_transform(output_grad, orig_call.attrs.index_map, pad_value=0),
        no_grad(x_shape),
    ]


@register_gradient("relax.grad.pixel_shuffle_backward_data")
def pixel_shuffle_backward_data(orig_var, orig_call, output_grad, ctx):
    """Gradient of pixel_shuffle_backward_data.

    Forward form: ``dx = pixel_shuffle_backward_data(dy, x.shape, upscale_factor)``.

    Backward form: ``[pixel_shuffle(dx_grad, upscale_factor), no_grad]``.
    """
    _, data_shape = orig_call.args
    return [
        relax.op.nn.pixel_shuffle(output_grad, int(orig_call.attrs.upscale_factor)),
        no_grad(data_shape),
    ]
