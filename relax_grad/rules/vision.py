"""Gradients of vision operators."""

from __future__ import annotations

from collections.abc import Callable

from tvm import relax
from tvm.relax.op import grad as backward

from ..ir.compat import applies_softmax
from ..op.vision import roi_attrs
from ..registry import register_gradient
from ._util import cast_like, dtype_of, no_grad, reshape_like, wide_dtype, widen


@register_gradient("relax.vision.roi_align")
def roi_align(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of roi_align.

    Forward form: ``y = roi_align(x, rois)``.

    Backward form: ``[roi_align_backward_data(y_grad, x, rois), no_grad]``: the regions have no
    gradient, as in torchvision.
    """
    return _roi(backward.roi_align_backward_data, orig_call, output_grad)


@register_gradient("relax.vision.roi_pool")
def roi_pool(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of roi_pool.

    Forward form: ``y = roi_pool(x, rois)``.

    Backward form: ``[roi_pool_backward_data(y_grad, x, rois), no_grad]``: the regions have no
    gradient, as in torchvision.
    """
    return _roi(backward.roi_pool_backward_data, orig_call, output_grad)


@register_gradient("relax.vision.multibox_transform_loc")
def multibox_transform_loc(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of multibox_transform_loc.

    Forward form: ``loc_pred`` holds the offsets ``e`` (for x, y) and ``f`` (for width, height).
    Each prior box has a ``size`` and a ``centre``. With ``half = exp(f * v_wh) / 2 * size`` and
    ``middle = e * v_xy * size + centre``, the boxes are ``[middle - half, middle + half]``,
    optionally clipped to [0, 1]. The scores are ``s = softmax(cls_pred)`` (or cls_pred itself)
    where ``s >= threshold``, optionally without the background class.

    Backward form: let ``g`` be the boxes' gradient, 0 where it was clipped,
    ``m_grad = g_min + g_max`` and ``h_grad = g_max - g_min``. The gradient of ``e`` is
    ``m_grad * v_xy * size``, that of ``f`` is ``h_grad
    * half * v_wh``. That of the priors' size is ``m_grad * e * v_xy + h_grad * exp(f * v_wh) / 2``
      and that of
    their centre ``m_grad``, both summed over the batch. That of ``cls_pred`` is the gradient of
    softmax for the scores that were kept. Half precision is computed in float32.
    """
    cls_pred, loc_pred, anchor = orig_call.args
    boxes_grad, scores_grad = (
        ctx.emit(widen(ctx.normalize(relax.TupleGetItem(output_grad, i)))) for i in (0, 1)
    )
    boxes = ctx.emit(relax.TupleGetItem(orig_var, 0))
    loc_grad, anchor_grad = _boxes(ctx, orig_call.attrs, boxes, loc_pred, anchor, grad=boxes_grad)
    return [
        cast_like(ctx, _scores(ctx, orig_call.attrs, cls_pred, scores_grad), cls_pred),
        cast_like(ctx, reshape_like(loc_grad, loc_pred), loc_pred),
        cast_like(ctx, anchor_grad, anchor),
    ]


def _boxes(
    ctx: relax.BlockBuilder,
    attrs: relax.op.op_attrs.Attrs,
    boxes: relax.Expr,
    loc_pred: relax.Expr,
    anchor: relax.Expr,
    grad: relax.Expr,
) -> tuple[relax.Expr, relax.Expr]:
    """Return the gradients of the boxes' offsets, of shape ``[batch, n, 4]``, and of the prior
    boxes."""
    dtype = wide_dtype(loc_pred)
    op = relax.op

    def halves(tensor: relax.Expr) -> tuple[relax.Expr, relax.Expr]:
        pair = ctx.emit(op.split(tensor, 2, axis=-1))
        return relax.TupleGetItem(pair, 0), relax.TupleGetItem(pair, 1)

    def joined(*tensors: relax.Expr) -> relax.Expr:
        return ctx.emit(op.concat(tensors, axis=-1))

    variances = [float(variance) for variance in attrs.variances]
    v_xy, v_wh = relax.const(variances[:2], dtype), relax.const(variances[2:], dtype)
    offset, scale = halves(reshape_like(ctx.emit(widen(loc_pred)), boxes))
    low, high = halves(widen(anchor))
    size = ctx.emit(op.subtract(high, low))
    centre = ctx.emit(op.multiply(op.add(low, high), relax.const(0.5, dtype)))
    step = ctx.emit(op.multiply(offset, v_xy))
    growth = ctx.emit(op.multiply(op.exp(op.multiply(scale, v_wh)), relax.const(0.5, dtype)))
    half = ctx.emit(op.multiply(growth, size))

    # The boxes have y before x.
    sides = ctx.emit(op.split(grad, 4, axis=-1))
    y_min, x_min, y_max, x_max = (relax.TupleGetItem(sides, i) for i in range(4))
    min_grad, max_grad = joined(x_min, y_min), joined(x_max, y_max)
    if attrs.clip:
        middle = ctx.emit(op.add(op.multiply(step, size), centre))
        min_grad = _where_inside(ctx, op.subtract(middle, half), min_grad)
        max_grad = _where_inside(ctx, op.add(middle, half), max_grad)
    middle_grad = ctx.emit(op.add(min_grad, max_grad))
    half_grad = ctx.emit(op.subtract(max_grad, min_grad))

    loc_grad = joined(
        op.multiply(op.multiply(middle_grad, size), v_xy),
        op.multiply(op.multiply(half_grad, half), v_wh),
    )
    size_grad = ctx.emit(op.add(op.multiply(middle_grad, step), op.multiply(half_grad, growth)))
    centre_grad = ctx.emit(op.multiply(middle_grad, relax.const(0.5, dtype)))
    corners = joined(op.subtract(centre_grad, size_grad), op.add(centre_grad, size_grad))
    return loc_grad, op.sum(corners, axis=[0], keepdims=True)


def _scores(
    ctx: relax.BlockBuilder, attrs: relax.op.op_attrs.Attrs, cls_pred: relax.Expr, grad: relax.Expr
) -> relax.Expr:
    """Return the gradient of the class predictions."""
    op = relax.op
    scores = ctx.emit(widen(cls_pred))
    softmax = applies_softmax(attrs)
    if softmax:
        scores = ctx.emit(op.nn.softmax(scores, axis=1))
    threshold = relax.const(float(attrs.threshold), dtype_of(scores))
    zero = relax.const(0, dtype_of(grad))
    grad = ctx.emit(op.where(op.greater_equal(scores, threshold), grad, zero))
    if not attrs.keep_background:
        number = op.cumsum(op.ones_like(grad), axis=1)  # of the class, counted from 1
        grad = ctx.emit(op.where(op.greater(number, relax.const(1, dtype_of(grad))), grad, zero))
    if not softmax:
        return grad
    weighted = ctx.emit(op.multiply(scores, grad))
    total = op.sum(weighted, axis=[1], keepdims=True)
    return op.subtract(weighted, op.multiply(scores, total))


def _where_inside(ctx: relax.BlockBuilder, value: relax.Expr, grad: relax.Expr) -> relax.Expr:
    """Keep the gradient where a value lies in [0, 1]."""
    value = ctx.emit(value)
    low, high = (relax.const(bound, dtype_of(value)) for bound in (0, 1))
    inside = relax.op.logical_and(
        relax.op.greater_equal(value, low), relax.op.less_equal(value, high)
    )
    return ctx.emit(relax.op.where(inside, grad, relax.const(0, dtype_of(grad))))


def _roi(
    builder: Callable[..., relax.Expr], call: relax.Call, output_grad: relax.Expr
) -> list[relax.Expr]:
    data, rois = call.args
    return [builder(output_grad, data, rois, **roi_attrs(call)), no_grad(rois)]
