"""Gradients of the operators that broadcast, repeat and reshape."""

from __future__ import annotations

from tvm import relax
from tvm.relax.op import grad as backward

from ..errors import GradientError
from ..registry import register_gradient
from ._util import (
    broadcast_like,
    is_const,
    is_static,
    no_grad,
    reshape_like,
    shape_arg,
    shape_of,
    unbroadcast,
)


@register_gradient("relax.broadcast_to", corrects="fails at order 2 for symbolic shapes")
def broadcast_to(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of broadcast_to.

    Forward form: ``y = broadcast_to(x, shape)``.

    Backward form: ``[collapse_sum_to(y_grad, x.shape), no_grad]``.
    """
    x, shape = orig_call.args
    return [unbroadcast(ctx, output_grad, x), no_grad(shape)]


@register_gradient("relax.collapse_sum_to")
def collapse_sum_to(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of collapse_sum_to.

    Forward form: ``y = collapse_sum_to(x, shape)``.

    Backward form: ``[broadcast_to(y_grad, x.shape), no_grad]``.
    """
    x, shape = orig_call.args
    return [broadcast_like(output_grad, x), no_grad(shape)]


@register_gradient("relax.collapse_sum_like")
def collapse_sum_like(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of collapse_sum_like.

    Forward form: ``y = collapse_sum_like(x, like)``.

    Backward form: ``[broadcast_to(y_grad, x.shape), no_grad]``.
    """
    x, like = orig_call.args
    return [broadcast_like(output_grad, x), no_grad(like)]


@register_gradient("relax.tile")
def tile(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of tile.

    Forward form: ``y = tile(x, repeats)``.

    Backward form: ``[tile_backward_data(y_grad, x.shape, repeats)]``: the sum of the copies.
    """
    (x,) = orig_call.args
    return [backward.tile_backward_data(output_grad, shape_arg(x), orig_call.attrs.repeats)]


@register_gradient("relax.repeat")
def repeat(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of repeat.

    Forward form: ``y = repeat(x, repeats, axis)``.

    Backward form: ``[repeat_backward_data(y_grad, x.shape, repeats, axis)]``: the sum of the
    copies.
    """
    (x,) = orig_call.args
    attrs = orig_call.attrs
    return [backward.repeat_backward_data(output_grad, shape_arg(x), attrs.repeats, attrs.axis)]


@register_gradient("relax.squeeze")
def squeeze(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of squeeze.

    Forward form: ``y = squeeze(x, axis)``.

    Backward form: ``[expand_dims(y_grad, axis)]``, except the axes that squeeze keeps because their
    extent is not 1.
    """
    (x,) = orig_call.args
    extents = shape_of(x)
    axis = orig_call.attrs.axis
    if axis is None:
        if not is_static(x):
            raise GradientError(
                f"squeeze needs axes for the symbolic shape {extents}, whose axes of extent 1 are "
                "known at run time only; pass axis"
            )
        axis = range(len(extents))
    removed = sorted({int(a) % len(extents) for a in axis})
    removed = [a for a in removed if not is_const(extents[a]) or int(extents[a]) == 1]
    if not removed:
        return [output_grad]
    expanded = relax.op.expand_dims(output_grad, removed)
    if all(is_const(extents[a]) for a in removed):
        return [expanded]
    return [broadcast_like(expanded, x)]  # whose type has the symbolic extent


@register_gradient("relax.flatten")
def flatten(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of flatten.

    Forward form: ``y = flatten(x)``.

    Backward form: ``[reshape(y_grad, x.shape)]``.
    """
    (x,) = orig_call.args
    return [reshape_like(output_grad, x)]


@register_gradient(
    "relax.reshape", corrects="fails at order 2 for symbolic shapes, and misreads an extent of 0"
)
def reshape(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of reshape.

    Forward form: ``y = reshape(x, shape)``.

    Backward form: ``[reshape(y_grad, x.shape), no_grad]``.
    """
    x, shape = orig_call.args
    return [reshape_like(output_grad, x), no_grad(shape)]


@register_gradient("relax.nn.batch_flatten")
def batch_flatten(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of batch_flatten.

    Forward form: ``y = batch_flatten(x)``, which keeps the first axis.

    Backward form: ``[reshape(y_grad, x.shape)]``.
    """
    (x,) = orig_call.args
    return [reshape_like(output_grad, x)]
