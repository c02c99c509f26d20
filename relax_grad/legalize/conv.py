"""Legalization of the backward operators of convolution."""

from __future__ import annotations

from tvm import relax

from .. import topi
from ..registry import register_legalize
from ._util import int_list, shape_values


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
        "out_dtype": str(getattr(call.ty.dtype, "dtype", call.ty.dtype)),
    }
