"""Gradients of the backward operators of pooling over regions of interest.

The data only determines the positions of the largest samples.
"""

from __future__ import annotations

from tvm import relax
from tvm.relax.op import grad as backward

from ...op.vision import roi_attrs
from .._linear import register_linear


def _roi_align(grad: relax.Expr, call: relax.Call) -> relax.Expr:
    _, data, rois = call.args
    attrs = roi_attrs(call)
    if attrs["mode"] == "max":
        return backward.roi_align_jvp(grad, data, rois, **attrs)
    return relax.op.vision.roi_align(grad, rois, **attrs)


register_linear(
    "roi_align_backward_data",
    "dx = roi_align_backward_data(dy, x, rois)",
    "roi_align(dx_grad, rois)",
    _roi_align,
    note="For the mode ``max`` it is ``roi_align_jvp(dx_grad, x, rois)``.",
)
register_linear(
    "roi_align_jvp",
    "y' = roi_align_jvp(x', x, rois)",
    "roi_align_backward_data(y'_grad, x, rois)",
    lambda grad, call: backward.roi_align_backward_data(grad, *call.args[1:], **roi_attrs(call)),
)
register_linear(
    "roi_pool_backward_data",
    "dx = roi_pool_backward_data(dy, x, rois)",
    "roi_pool_jvp(dx_grad, x, rois)",
    lambda grad, call: backward.roi_pool_jvp(grad, *call.args[1:], **roi_attrs(call)),
)
register_linear(
    "roi_pool_jvp",
    "y' = roi_pool_jvp(x', x, rois)",
    "roi_pool_backward_data(y'_grad, x, rois)",
    lambda grad, call: backward.roi_pool_backward_data(grad, *call.args[1:], **roi_attrs(call)),
)
