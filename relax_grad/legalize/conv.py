"""Legalization of the backward operators of convolution, and of conv2d in every layout."""

from __future__ import annotations

from tvm import relax
from tvm.relax.transform.legalize_ops.nn import _nn_conv2d as tvm_conv2d

from .. import topi
from .._compat import dtype_of
from ..registry import register_legalize
from ..topi._util import axes
from ._util import int_list, shape_values


@register_legalize(
    "relax.nn.conv2d",
    corrects="where a layout has W before H, takes strides, padding, dilation and the kernel by position "
    "and not, as its type inference does, by name; leaves calls with an out_layout of their own",
)
def _conv2d(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    attrs = call.attrs
    layouts = [attrs.data_layout, attrs.kernel_layout, attrs.out_layout]
    plain = [_height_first(layout) for layout in layouts]
    plain[2] = plain[0]
    if plain == layouts or any(len(layout) != 4 for layout in layouts):
        return tvm_conv2d(bb, call)
    data, weight = map(_permute, call.args, layouts, plain)
    result = relax.op.nn.conv2d(
        data,
        weight,
        strides=attrs.strides,
        padding=attrs.padding,
        dilation=attrs.dilation,
        groups=attrs.groups,
        data_layout=plain[0],
        kernel_layout=plain[1],
        out_dtype=attrs.out_dtype,
    )
    return _permute(result, plain[2], layouts[2])


def _height_first(layout: str) -> str:
    """Exchange H and W where W comes first: TVM's convolution takes the spatial axes in this order."""
    swap = str.maketrans("HW", "WH")
    return layout.translate(swap) if layout.find("W") < layout.find("H") else layout


def _permute(tensor: relax.Expr, layout: str, to: str) -> relax.Expr:
    return tensor if layout == to else relax.op.permute_dims(tensor, axes(layout, to))


@register_legalize("relax.grad.conv2d_backward_data")
def _conv2d_backward_data(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    output_grad, data_shape, weight = call.args
    return bb.call_te(
        topi.conv_backward_data,
        output_grad,
        weight,
        shape_values(data_shape),
        **_attrs(call),
        primfunc_name_hint="conv2d_backward_data",
    )


@register_legalize("relax.grad.conv2d_backward_weight")
def _conv2d_backward_weight(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    output_grad, data, weight_shape = call.args
    return bb.call_te(
        topi.conv_backward_weight,
        output_grad,
        data,
        shape_values(weight_shape),
        **_attrs(call),
        primfunc_name_hint="conv2d_backward_weight",
    )


def _attrs(call: relax.Call) -> dict:
    attrs = call.attrs
    return {
        "strides": int_list(attrs.strides),
        "padding": int_list(attrs.padding),
        "dilation": int_list(attrs.dilation),
        "groups": int(attrs.groups),
        "data_layout": attrs.data_layout,
        "kernel_layout": attrs.kernel_layout,
        "out_layout": attrs.out_layout,
        "out_dtype": dtype_of(call.ty),
    }
