"""Legalization of pooling over regions of interest and of its backward operators."""

from __future__ import annotations

from tvm import relax

from ..ir.module import short_name
from ..op.vision import roi_attrs
from ..registry import register_legalize
from ..topi import roi_align as topi_roi_align
from ..topi import roi_pool as topi_roi_pool


@register_legalize(
    "relax.vision.roi_align",
    corrects="reads out of bounds at a batch index outside the data, leaves a bin without samples "
    "undefined, and returns the regions' dtype where it is wider than the data's",
)
def _roi_align(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return _call(bb, topi_roi_align, call)


@register_legalize(
    "relax.vision.roi_pool",
    corrects="reads out of bounds at a batch index outside the data, and reads all of the data for every "
    "bin",
)
def _roi_pool(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return _call(bb, topi_roi_pool, call)


@register_legalize("relax.grad.roi_align_backward_data")
@register_legalize("relax.grad.roi_align_jvp")
def _roi_align_backward(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return _call(bb, topi_roi_align, call)


@register_legalize("relax.grad.roi_pool_backward_data")
@register_legalize("relax.grad.roi_pool_jvp")
def _roi_pool_backward(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return _call(bb, topi_roi_pool, call)


def _call(bb: relax.BlockBuilder, module, call: relax.Call) -> relax.Expr:
    name = short_name(call)
    function = getattr(module, name)
    return bb.call_te(function, *call.args, **roi_attrs(call), primfunc_name_hint=name)
