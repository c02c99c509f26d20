"""Gradients of the operators that move elements about."""

from __future__ import annotations

from tvm import relax, tirx
from tvm.relax.op import grad as backward

from ..errors import GradientError
from ..registry import register_gradient
from ._util import broadcast_like, is_static, no_grad, shape_arg, shape_of, unbroadcast


@register_gradient("relax.broadcast_to", corrects="symbolic shapes end at order 1")
def broadcast_to(orig_var, orig_call, output_grad, ctx):
    """Gradient of broadcast_to.

    Forward form: ``y = broadcast_to(x, shape)``.

    Backward form: ``[collapse_sum_to(y_grad, x.shape), no_grad]``.
    """
    x, shape = orig_call.args
    return [unbroadcast(ctx, output_grad, x), no_grad(shape)]


@register_gradient("relax.collapse_sum_to")
def collapse_sum_to(orig_var, orig_call, output_grad, ctx):
    """Gradient of collapse_sum_to.

    Forward form: ``y = collapse_sum_to(x, shape)``.

    Backward form: ``[broadcast_to(y_grad, x.shape), no_grad]``.
    """
    x, shape = orig_call.args
    return [broadcast_like(output_grad, x), no_grad(shape)]


@register_gradient("relax.collapse_sum_like")
def collapse_sum_like(orig_var, orig_call, output_grad, ctx):
    """Gradient of collapse_sum_like.

    Forward form: ``y = collapse_sum_like(x, like)``.

    Backward form: ``[broadcast_to(y_grad, x.shape), no_grad]``.
    """
    x, like = orig_call.args
    return [broadcast_like(output_grad, x), no_grad(like)]


@register_gradient("relax.tile")
def tile(orig_var, orig_call, output_grad, ctx):
    """Gradient of tile.

    Forward form: ``y = tile(x, repeats)``.

    Backward form: ``[tile_backward_data(y_grad, x.shape, repeats)]``: the sum of the copies.
    """
    (x,) = orig_call.args
    return [backward.tile_backward_data(output_grad, shape_arg(x), orig_call.attrs.repeats)]


@register_gradient("relax.repeat")
def repeat(orig_var, orig_call, output_grad, ctx):
    """Gradient of repeat.

    Forward form: ``y = repeat(x, repeats, axis)``.

    Backward form: ``[repeat_backward_data(y_grad, x.shape, repeats, axis)]``: the sum of the copies.
    """
    (x,) = orig_call.args
    attrs = orig_call.attrs
    return [backward.repeat_backward_data(output_grad, shape_arg(x), attrs.repeats, attrs.axis)]


@register_gradient("relax.squeeze")
def squeeze(orig_var, orig_call, output_grad, ctx):
    """Gradient of squeeze.

    Forward form: ``y = squeeze(x, axis)``.

    Backward form: ``[expand_dims(y_grad, axis)]``, without the axes that squeeze left alone because
    their extent is not 1.
    """
    (x,) = orig_call.args
    extents = shape_of(x)
    axis = orig_call.attrs.axis
    if axis is None:
        if not is_static(x):
            raise GradientError(
                f"squeeze without axes cannot know which axes of the symbolic shape {extents} have "
                "extent 1; name them"
            )
        axis = range(len(extents))
    removed = sorted({int(a) % len(extents) for a in axis})
    removed = [a for a in removed if not _is_const(extents[a]) or int(extents[a]) == 1]
    if not removed:
        return [output_grad]
    expanded = relax.op.expand_dims(output_grad, removed)
    if all(_is_const(extents[a]) for a in removed):
        return [expanded]
    return [broadcast_like(expanded, x)]  # which has the symbolic extent in its type


@register_gradient("relax.flatten")
def flatten(orig_var, orig_call, output_grad, ctx):
    """Gradient of flatten.

    Forward form: ``y = flatten(x)``.

    Backward form: ``[reshape(y_grad, x.shape)]``.
    """
    (x,) = orig_call.args
    return [_reshape_like(output_grad, x)]


@register_gradient(
    "relax.reshape", corrects="symbolic shapes end at order 1, and an extent 0 is misread"
)
def reshape(orig_var, orig_call, output_grad, ctx):
    """Gradient of reshape.

    Forward form: ``y = reshape(x, shape)``.

    Backward form: ``[reshape(y_grad, x.shape), no_grad]``.
    """
    x, shape = orig_call.args
    return [_reshape_like(output_grad, x), no_grad(shape)]


@register_gradient(
    "relax.concat",
    corrects="refuses a single tensor, and symbolic or empty extents along the axis",
)
def concat(orig_var, orig_call, output_grad, ctx):
    """Gradient of concat.

    Forward form: ``y = concat((x1, x2, ...), axis)``.

    Backward form: ``[split(y_grad, [x1.shape[axis], x1.shape[axis] + x2.shape[axis], ...], axis)]``,
    by ``concat_backward_tensors`` where split does not take the extents.
    """
    (tensors,) = orig_call.args
    fields = (
        list(tensors.fields)
        if isinstance(tensors, relax.Tuple)
        else [relax.TupleGetItem(tensors, i) for i in range(len(tensors.ty.fields))]
    )
    if len(fields) == 1:
        return [relax.Tuple([output_grad])]
    axis = 0 if orig_call.attrs.axis is None else int(orig_call.attrs.axis)
    fields = [ctx.normalize(field) for field in fields]
    extents = [shape_of(field)[axis] for field in fields]
    if all(_is_const(extent) and int(extent) > 0 for extent in extents):
        ends = [sum(map(int, extents[:i])) for i in range(1, len(extents))]
        return [relax.op.split(output_grad, ends, axis)]
    shapes = [shape_arg(field) for field in fields]
    return [backward.concat_backward_tensors(output_grad, shapes, axis)]


@register_gradient("relax.split", corrects="refuses a split into one")
def split(orig_var, orig_call, output_grad, ctx):
    """Gradient of split.

    Forward form: ``y1, y2, ... = split(x, indices_or_sections, axis)``; a split into one is ``y = x``.

    Backward form: ``[concat((y1_grad, y2_grad, ...), axis)]``.
    """
    if isinstance(orig_var.ty, relax.TensorType):
        return [output_grad]
    return [relax.op.concat(output_grad, int(orig_call.attrs.axis))]


def _reshape_like(grad: relax.Expr, like: relax.Expr) -> relax.Expr:
    """Reshape a gradient to the shape of ``like``.

    In a shape that is written out, reshape takes an extent of 0 for "as in the data".
    """
    shape = shape_of(like)
    if all(_is_const(extent) and int(extent) != 0 for extent in shape):
        return relax.op.reshape(grad, like.ty.shape)
    return relax.op.reshape(grad, relax.op.shape_of(like))


def _is_const(extent: tirx.PrimExpr) -> bool:
    return isinstance(extent, tirx.IntImm)
