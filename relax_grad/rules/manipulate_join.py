"""Gradients of the operators that join and split tensors."""

from __future__ import annotations

from tvm import relax
from tvm.relax.op import grad as backward

from ..errors import GradientError
from ..ir.module import tuple_fields
from ..registry import register_gradient
from ._util import cast_like, is_const, shape_arg, shape_of, widen


@register_gradient(
    "relax.concat",
    corrects="refuses a single tensor, and symbolic or empty extents along the axis",
)
def concat(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of concat.

    Forward form: ``y = concat((x1, x2, ...), axis)``.

    Backward form: ``[split(y_grad, [x1.shape[axis], x1.shape[axis] + x2.shape[axis], ...],
    axis)]``, or ``concat_backward_tensors`` if split does not support the extents.
    """
    (tensors,) = orig_call.args
    fields = tuple_fields(tensors)
    if len(fields) == 1:
        return [relax.Tuple([output_grad])]
    axis = 0 if orig_call.attrs.axis is None else int(orig_call.attrs.axis)
    extents = [shape_of(field)[axis] for field in fields]
    if all(is_const(extent) and int(extent) > 0 for extent in extents):
        ends = [sum(map(int, extents[:i])) for i in range(1, len(extents))]
        return [relax.op.split(output_grad, ends, axis)]
    shapes = [shape_arg(field) for field in fields]
    return [backward.concat_backward_tensors(output_grad, shapes, axis)]


@register_gradient(
    "relax.split", corrects="refuses a split into one, and parts that overlap or are symbolic"
)
def split(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of split.

    Forward form: ``y1, y2, ... = split(x, indices_or_sections, axis)``; a split into one is
    ``y = x``.

    Backward form: ``[concat((y1_grad, y2_grad, ...), axis)]``, or ``split_backward_x`` if the parts
    overlap or their extents along the axis are symbolic.
    """
    (x,) = orig_call.args
    attrs = orig_call.attrs
    if isinstance(orig_var.ty, relax.TensorType):
        return [output_grad]
    axis = int(attrs.axis)
    extent = shape_of(x)[axis]
    extents = [field.shape.values[axis] for field in orig_var.ty.fields]
    if any(is_const(part) and int(part) < 0 for part in extents):
        raise GradientError(
            f"TVM infers the extents {[int(part) for part in extents]} for a split of "
            f"{int(extent)} into {len(extents)}; split at indices instead"
        )
    if all(map(is_const, [extent, *extents])) and sum(map(int, extents)) == int(extent):
        return [relax.op.concat(output_grad, axis)]
    return [
        backward.split_backward_x(output_grad, shape_arg(x), attrs.indices_or_sections, axis),
    ]


@register_gradient("relax.stack")
def stack(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of stack.

    Forward form: ``y = stack((x1, x2, ...), axis)``.

    Backward form: ``[stack_backward_tensors(y_grad, axis)]``: the slices ``y_grad[.., i, ..]``.
    """
    shape_of(orig_var)  # raises if TVM cannot prove that the shapes are equal
    return [backward.stack_backward_tensors(output_grad, orig_call.attrs.axis)]


@register_gradient("relax.meshgrid")
def meshgrid(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of meshgrid.

    Forward form: ``y1, y2, ... = meshgrid((x1, x2, ...), indexing)``: each ``yi`` repeats ``xi``
    along the axes of the others; with the indexing ``"xy"`` the first two axes are swapped.

    Backward form: ``[(sum(y1_grad, axes of the others), sum(y2_grad, axes of the others), ...)]``,
    in float32 at least.
    """
    (tensors,) = orig_call.args
    fields = tuple_fields(tensors)
    axes = list(range(len(fields)))
    own_axes = [1, 0, *axes[2:]] if orig_call.attrs.indexing == "xy" and len(axes) > 1 else axes
    partials = []
    for i, (field, own) in enumerate(zip(fields, own_axes, strict=True)):
        partial = ctx.normalize(relax.TupleGetItem(output_grad, i))
        if len(axes) > 1:
            partial = relax.op.sum(widen(partial), [axis for axis in axes if axis != own])
        partials.append(cast_like(ctx, partial, field))
    return [relax.Tuple(partials)]
