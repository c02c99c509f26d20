"""Gradients of the backward operators of pooling over regions of interest."""

from __future__ import annotations

from tvm import relax
from tvm.relax.op import grad as backward

from ...op.vision import roi_attrs
from ...registry import register_gradient
from .._util import no_grad


@register_gradient("relax.grad.roi_align_backward_data")
def roi_align_backward_data(orig_var, orig_call, output_grad, ctx):
    """Gradient of roi_align_backward_data.

    Forward form: ``dx = roi_align_backward_data(dy, x, rois)``, which depends on ``x`` by which samples
    are largest only.

    Backward form: ``[roi_align(dx_grad, rois), no_grad, no_grad]``, for the mode ``max``
    ``[roi_align_jvp(dx_grad, x, rois), no_grad, no_grad]``.
    """
    _, data, rois = orig_call.args
    attrs = roi_attrs(orig_call)
    if attrs["mode"] == "max":
        partial = backward.roi_align_jvp(output_grad, data, rois, **attrs)
    else:
        partial = relax.op.vision.roi_align(output_grad, rois, **attrs)
    return [partial, no_grad(data), no_grad(rois)]


@register_gradient("relax.grad.roi_align_jvp")
def roi_align_jvp(orig_var, orig_call, output_grad, ctx):
    """Gradient of roi_align_jvp.

    Forward form: ``y' = roi_align_jvp(x', x, rois)``.

    Backward form: ``[roi_align_backward_data(y'_grad, x, rois), no_grad, no_grad]``.
    """
    return _jvp(backward.roi_align_backward_data, orig_call, output_grad)


@register_gradient("relax.grad.roi_pool_backward_data")
def roi_pool_backward_data(orig_var, orig_call, output_grad, ctx):
    """Gradient of roi_pool_backward_data.

    Forward form: ``dx = roi_pool_backward_data(dy, x, rois)``, which depends on ``x`` by which elements
    are largest only.

    Backward form: ``[roi_pool_jvp(dx_grad, x, rois), no_grad, no_grad]``.
    """
    _, data, rois = orig_call.args
    partial = backward.roi_pool_jvp(output_grad, data, rois, **roi_attrs(orig_call))
    return [partial, no_grad(data), no_grad(rois)]


@register_gradient("relax.grad.roi_pool_jvp")
def roi_pool_jvp(orig_var, orig_call, output_grad, ctx):
    """Gradient of roi_pool_jvp.

    Forward form: ``y' = roi_pool_jvp(x', x, rois)``.

    Backward form: ``[roi_pool_backward_data(y'_grad, x, rois), no_grad, no_grad]``.
    """
    return _jvp(backward.roi_pool_backward_data, orig_call, output_grad)


def _jvp(transpose, call, output_grad):
    _, data, rois = call.args
    partial = transpose(output_grad, data, rois, **roi_attrs(call))
    return [partial, no_grad(data), no_grad(rois)]
