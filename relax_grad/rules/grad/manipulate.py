"""Gradients of the backward operators of the operators that move elements about."""

from __future__ import annotations

from tvm.relax import op

from .._linear import register_linear

register_linear(
    "tile_backward_data",
    "dx = tile_backward_data(dy, x.shape, repeats)",
    "tile(dx_grad, repeats)",
    lambda grad, call: op.tile(grad, call.attrs.repeats),
)
register_linear(
    "repeat_backward_data",
    "dx = repeat_backward_data(dy, x.shape, repeats, axis)",
    "repeat(dx_grad, repeats, axis)",
    lambda grad, call: op.repeat(grad, call.attrs.repeats, call.attrs.axis),
)
register_linear(
    "concat_backward_tensors",
    "dx1, dx2, ... = concat_backward_tensors(dy, (x1.shape, x2.shape, ...), axis)",
    "concat((dx1_grad, dx2_grad, ...), axis)",
    lambda grad, call: op.concat(grad, call.attrs.axis),
)
register_linear(
    "split_backward_x",
    "dx = split_backward_x((dy1, dy2, ...), x.shape, indices_or_sections, axis)",
    "split(dx_grad, indices_or_sections, axis)",
    lambda grad, call: op.split(grad, call.attrs.indices_or_sections, int(call.attrs.axis)),
)
register_linear(
    "stack_backward_tensors",
    "dx1, dx2, ... = stack_backward_tensors(dy, axis)",
    "stack((dx1_grad, dx2_grad, ...), axis)",
    lambda grad, call: op.stack(grad, call.attrs.axis),
)
register_linear(
    "layout_transform_backward_x",
    "dx = layout_transform_backward_x(dy, x.shape, index_map)",
    "layout_transform(dx_grad, index_map, pad_value=0)",
    lambda grad, call: op.layout_transform(grad, call.attrs.index_map, pad_value=0),
)
register_linear(
    "pixel_shuffle_backward_data",
    "dx = pixel_shuffle_backward_data(dy, x.shape, upscale_factor)",
    "pixel_shuffle(dx_grad, upscale_factor)",
    lambda grad, call: op.nn.pixel_shuffle(grad, int(call.attrs.upscale_factor)),
)
