"""The backward operators of the normalisations."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax
from tvm.ir import Op

from ._declare import Shape, as_shape, declare_op, shape_values, tensor_type
from ._layout import follow_elementwise


def divide_by_count(
    data: relax.Expr, of_shape: relax.Expr | Shape, axis: int | Sequence[int] | None = None
) -> relax.Call:
    """Divide by the number of elements that a tensor of the given shape has along the axes.

    A sum becomes a mean without a constant for the number, which there is none of for a symbolic
    extent, and without a pass over the tensor to count it.

    Parameters
    ----------
    data : relax.Expr
        What to divide.
    of_shape : relax.Expr or Sequence[int or PrimExpr]
        The shape to count in.
    axis : int or Sequence[int], optional
        The axes to count along; by default all of them.

    Returns
    -------
    result : relax.Call
        A tensor of the shape and the dtype of ``data``; half precision is divided in float32.
    """
    unused = relax.Var("unused", relax.TensorType(dtype="float32"))
    return relax.Call(
        Op.get("relax.grad.divide_by_count"),
        [data, as_shape(of_shape)],
        relax.op.squeeze(unused, axis).attrs,
    )


def _infer_divide_by_count(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    data = tensor_type(call, 0, "data")
    shape_values(call, 1, "of_shape")
    ndim, axes = call.args[1].ty.ndim, call.attrs.axis
    if ndim < 0:
        raise ValueError(f"{call.op.name}: the rank of of_shape must be known")
    for axis in axes or ():
        if not -ndim <= int(axis) < ndim:
            raise ValueError(
                f"{call.op.name}: axis must lie in [{-ndim}, {ndim}) for a shape of {ndim} "
                f"dimensions, but it is {axes}"
            )
    return data


declare_op(
    "divide_by_count",
    [
        ("data", "Tensor", "What to divide."),
        ("of_shape", "Shape", "The shape to count in."),
    ],
    _infer_divide_by_count,
    divide_by_count,
    "relax.attrs.SqueezeAttrs",
)

# The axes are those of the shape, which stays as it is.
follow_elementwise("relax.grad.divide_by_count")
