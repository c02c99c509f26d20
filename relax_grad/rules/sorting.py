"""Gradients of sorting: each element gets the gradient of its new position."""

from __future__ import annotations

from tvm import relax
from tvm.relax.op import grad as backward

from ..errors import GradientError
from ..registry import register_gradient
from ._util import dtype_of, float_only, is_const, no_grad, shape_arg, shape_of


@register_gradient("relax.sort")
@float_only
def sort(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of sort.

    Forward form: ``y = sort(x, axis, descending)``.

    Backward form: ``[gather_elements_backward_data(y_grad, x.shape, argsort(x, axis, descending),
    axis)]``.
    """
    (x,) = orig_call.args
    attrs = orig_call.attrs
    axis = _checked_axis(orig_call)
    index = ctx.emit(relax.op.argsort(x, axis, attrs.descending, "int64"))
    return [backward.gather_elements_backward_data(output_grad, shape_arg(x), index, axis)]


@register_gradient("relax.topk")
@float_only
def topk(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of topk.

    Forward form: ``y, index = topk(x, k, axis, ret_type, largest, dtype)``, or one of the two.

    Backward form: ``[gather_elements_backward_data(y_grad, x.shape, index, axis)]``. If the call
    does not return the index, or not as an integer, it is recomputed. If only the index is
    returned, there is no gradient.
    """
    (x,) = orig_call.args
    attrs = orig_call.attrs
    if attrs.ret_type == "indices":
        return [no_grad(x)]
    axis, k = _checked_axis(orig_call), int(attrs.k)
    extent = shape_of(x)[axis]
    if is_const(extent) and k > int(extent):
        raise GradientError(
            f"k must not be larger than the extent {int(extent)} of the axis, but it is {k}: TVM "
            "fills the rest of the result with uninitialised memory; k=-1 takes all elements"
        )
    grad = output_grad
    index = None
    if attrs.ret_type == "both":
        grad = ctx.emit(relax.TupleGetItem(output_grad, 0))
        index = ctx.emit(relax.TupleGetItem(orig_var, 1))
    if index is None or "int" not in dtype_of(index):
        index = ctx.emit(relax.op.topk(x, k, axis, "indices", attrs.largest, "int64"))
    return [backward.gather_elements_backward_data(grad, shape_arg(x), index, axis)]


def _checked_axis(call: relax.Call) -> int:
    """Return the non-negative axis of a call, after a check that TVM sorts it correctly."""
    (x,) = call.args
    ndim, axis = len(shape_of(x)), int(call.attrs.axis)
    if not -ndim <= axis < ndim:
        raise GradientError(
            f"axis must lie in [{-ndim}, {ndim}) for a tensor of {ndim} dimensions, but it is "
            f"{axis}"
        )
    if dtype_of(x) == "bfloat16":
        raise GradientError(
            "TVM sorts bfloat16 wrongly; cast to float32 before the operator and back after it"
        )
    return axis % ndim
