"""Legalization of pooling over regions of interest and of its backward operators."""

from __future__ import annotations

from collections.abc import Callable

from tvm import relax

from ..op.vision import roi_attrs
from ..registry import register_legalize
from ..topi import roi_align as topi_roi_align
from ..topi import roi_pool as topi_roi_pool
from ._gpu import bind_threads


@register_legalize(
    "relax.vision.roi_align",
    corrects="reads out of bounds at a batch index outside the data, leaves a bin without samples "
    "undefined, and returns the regions' dtype where it is wider than the data's",
)
def _roi_align(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return bind_threads(bb, _call(bb, topi_roi_align.roi_align, call))


@register_legalize(
    "relax.vision.roi_pool",
    corrects="reads out of bounds at a batch index outside the data, and reads all of the data "
    "for every bin",
)
def _roi_pool(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return _call(bb, topi_roi_pool.roi_pool, call)


def _call(bb: relax.BlockBuilder, function: Callable, call: relax.Call) -> relax.Expr:
    name = function.__name__
    return bb.call_te(function, *call.args, **roi_attrs(call), primfunc_name_hint=name)


def _register(function: Callable) -> None:
    """Register a tensor expression as the legalization of the backward operator of the same
    name."""
    register_legalize(f"relax.grad.{function.__name__}")(lambda bb, call: _call(bb, function, call))


_register(topi_roi_align.roi_align_backward_data)
_register(topi_roi_align.roi_align_jvp)
_register(topi_roi_pool.roi_pool_backward_data)
_register(topi_roi_pool.roi_pool_jvp)
