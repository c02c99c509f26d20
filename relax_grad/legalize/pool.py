"""Legalization of the backward operators of pooling."""

from __future__ import annotations

from tvm import relax

from .._compat import dtype_of
from ..op.pool import check_pool2d_attrs, check_pool2d_backward
from ..registry import register_legalize
from ..topi.pool import avg_pool_backward, max_pool_backward, max_pool_jvp
from ._util import int_list


@register_legalize(
    "relax.grad.max_pool2d_backward",
    corrects="reads the argmax out of bounds where the windows do not tile the data, breaks ties and "
    "NaN differently from PyTorch, and has no dilation and no layout of its own for the result",
)
def _max_pool2d_backward(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    attrs = check_pool2d_backward(call, bb)
    return bb.call_te(
        max_pool_backward,
        *call.args,
        **_windows(attrs),
        primfunc_name_hint="max_pool2d_backward",
    )


@register_legalize(
    "relax.grad.avg_pool2d_backward",
    corrects="divides by another area than the forward operator where ceil_mode or the padding cuts a "
    "window off, and has no dilation and no layout of its own for the result",
)
def _avg_pool2d_backward(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    attrs = check_pool2d_backward(call, bb)
    output_grad, data = call.args
    return bb.call_te(
        avg_pool_backward,
        output_grad,
        list(data.ty.shape.values),
        count_include_pad=bool(attrs.count_include_pad),
        out_dtype=dtype_of(data.ty),
        **_windows(attrs),
        primfunc_name_hint="avg_pool2d_backward",
    )


@register_legalize("relax.grad.max_pool2d_jvp")
def _max_pool2d_jvp(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return bb.call_te(
        max_pool_jvp,
        *call.args,
        list(call.ty.shape.values),
        **_windows(check_pool2d_attrs(call)),
        primfunc_name_hint="max_pool2d_jvp",
    )


def _windows(attrs) -> dict:
    return {
        "pool_size": int_list(attrs.pool_size),
        "strides": int_list(attrs.strides),
        "padding": int_list(attrs.padding),
        "dilation": int_list(attrs.dilation),
        "layout": attrs.layout,
        "out_layout": attrs.out_layout,
    }
