"""Gradients of indexing."""

from __future__ import annotations

from tvm import relax, tirx
from tvm.relax.op import grad as backward

from ..errors import GradientError
from ..op.index import take_attrs
from ..registry import register_gradient
from ._util import is_const, no_grad, shape_arg, shape_of


@register_gradient(
    "relax.take",
    corrects=(
        "ignores mode, and is wrong for a negative axis, for indices outside the axis, and for "
        "indices that are not of rank 1"
    ),
)
def take(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of take.

    Forward form: ``y = take(x, indices, axis, mode)``.

    Backward form: ``[take_backward(y_grad, x, indices, axis, mode), no_grad]``: each element of x
    sums the gradients of its copies in y; an out-of-bounds index contributes nothing.
    """
    x, indices = orig_call.args
    return [
        backward.take_backward(output_grad, x, indices, **take_attrs(orig_call)),
        no_grad(indices),
    ]


@register_gradient("relax.gather_elements")
def gather_elements(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of gather_elements.

    Forward form: ``y[.., k, ..] = data[.., indices[.., k, ..], ..]``.

    Backward form: ``[gather_elements_backward_data(y_grad, data.shape, indices, axis), no_grad]``.
    """
    data, indices = orig_call.args
    return [
        backward.gather_elements_backward_data(
            output_grad, shape_arg(data), indices, int(orig_call.attrs.axis)
        ),
        no_grad(indices),
    ]


@register_gradient("relax.strided_slice")
def strided_slice(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of strided_slice.

    Forward form: ``y = strided_slice(x, axes, begin, end, strides)``.

    Backward form: ``[strided_slice_backward_data(y_grad, x.shape, axes, begin, end, strides),
    no_grad,
    ...]``: the gradient of each element in the slice, 0 for the others.
    """
    x, axes, begin, end, *strides = orig_call.args
    if not all(isinstance(arg, relax.Tuple) for arg in orig_call.args[1:]):
        raise GradientError(
            "axes, begin, end and strides must be written out as tuples, as TVM needs them to "
            f"compile the slice, but the call is {orig_call}"
        )
    if (
        orig_call.attrs.assume_inbound
        and strides
        and any(_is_negative(s) for s in strides[0].fields)
    ):
        raise GradientError(
            "TVM infers a wrong extent for a negative stride with assume_inbound; without "
            "assume_inbound it infers the right one"
        )
    if any(is_const(dim) and int(dim) < 0 for dim in shape_of(orig_var)):
        raise GradientError(
            f"TVM infers the shape {orig_var.ty.shape} with a negative extent, for example because "
            "end lies before begin; make the two equal for an empty slice"
        )
    steps = strides[0] if strides else relax.Tuple([tirx.IntImm("int64", 1) for _ in axes.fields])
    return [
        backward.strided_slice_backward_data(
            output_grad,
            shape_arg(x),
            axes,
            begin,
            end,
            strides=steps,
            assume_inbound=orig_call.attrs.assume_inbound,
        ),
        *(no_grad(arg) for arg in orig_call.args[1:]),
    ]


@register_gradient("relax.dynamic_strided_slice")
def dynamic_strided_slice(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of dynamic_strided_slice.

    Forward form: ``y = dynamic_strided_slice(x, begin, end, strides)``.

    Backward form: ``[dynamic_strided_slice_backward_data(y_grad, x.shape, begin, end, strides),
    no_grad, no_grad, no_grad]``.
    """
    x, *bounds = orig_call.args
    return [
        backward.dynamic_strided_slice_backward_data(output_grad, shape_arg(x), *bounds),
        *map(no_grad, bounds),
    ]


def _is_negative(stride: tirx.PrimExpr) -> bool:
    return is_const(stride) and int(stride) < 0
