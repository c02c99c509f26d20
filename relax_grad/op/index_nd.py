"""The backward operators of gather_nd and index_tensor, and their derivatives along a direction.

As with take, an out-of-bounds index contributes 0 to a gradient, while the forward operators return
NaN for it. So the transpose of a backward operator is the forward operator's derivative, which is 0
there. The operators here take indices of every integer dtype, because they are gradients of the
operators that write at indices, which do too.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax
from tvm.ir import Op

from ..ir.compat import dtype_of
from ._infer import forward_type, infer_data, tensor_type, type_of_shape
from .declare import Shape, as_shape, declare_op


def gather_nd_jvp(
    data_direction: relax.Expr, indices: relax.Expr, batch_dims: int = 0
) -> relax.Call:
    """Derivative of gather_nd along a direction of its data.

    Parameters
    ----------
    data_direction : relax.Expr
        The direction, of the shape of the data.
    indices : relax.Expr
        The indices, of any integer dtype.
    batch_dims : int
        As given to ``relax.op.gather_nd``.

    Returns
    -------
    result : relax.Call
        ``gather_nd(data_direction, indices)``, with 0 for an out-of-bounds index.
    """
    attrs = relax.op.gather_nd(data_direction, indices, batch_dims).attrs
    return relax.Call(Op.get("relax.grad.gather_nd_jvp"), [data_direction, indices], attrs)


def gather_nd_backward_data(
    output_grad: relax.Expr,
    data_shape: relax.Expr | Shape,
    indices: relax.Expr,
    batch_dims: int = 0,
) -> relax.Call:
    """Gradient of gather_nd with respect to its data.

    Parameters
    ----------
    output_grad : relax.Expr
        The gradient with respect to the result of ``gather_nd(data, indices, batch_dims)``.
    data_shape : relax.Expr or Sequence[int or PrimExpr]
        The shape of the data.
    indices : relax.Expr
        The indices, of any integer dtype; an out-of-bounds index contributes nothing.
    batch_dims : int
        As given to ``relax.op.gather_nd``.

    Returns
    -------
    result : relax.Call
        A tensor of shape ``data_shape`` in the dtype of ``output_grad``.
    """
    attrs = relax.op.gather_nd(output_grad, indices, batch_dims).attrs
    return relax.Call(
        Op.get("relax.grad.gather_nd_backward_data"),
        [output_grad, as_shape(data_shape), indices],
        attrs,
    )


def index_tensor_jvp(
    data_direction: relax.Expr, indices: relax.Expr | Sequence[relax.Expr]
) -> relax.Call:
    """Derivative of index_tensor along a direction of its data.

    Parameters
    ----------
    data_direction : relax.Expr
        The direction, of the shape of the data.
    indices : relax.Expr or Sequence[relax.Expr]
        The index tensors, of any integer dtype.

    Returns
    -------
    result : relax.Call
        ``index_tensor(data_direction, indices)``, with 0 for an out-of-bounds index.
    """
    return relax.Call(
        Op.get("relax.grad.index_tensor_jvp"), [data_direction, as_tuple(indices)], None
    )


def index_tensor_backward_data(
    output_grad: relax.Expr,
    data_shape: relax.Expr | Shape,
    indices: relax.Expr | Sequence[relax.Expr],
) -> relax.Call:
    """Gradient of index_tensor with respect to its data.

    Parameters
    ----------
    output_grad : relax.Expr
        The gradient with respect to the result of ``index_tensor(data, indices)``.
    data_shape : relax.Expr or Sequence[int or PrimExpr]
        The shape of the data.
    indices : relax.Expr or Sequence[relax.Expr]
        The index tensors, of any integer dtype; an out-of-bounds index contributes nothing.

    Returns
    -------
    result : relax.Call
        A tensor of shape ``data_shape`` in the dtype of ``output_grad``.
    """
    return relax.Call(
        Op.get("relax.grad.index_tensor_backward_data"),
        [output_grad, as_shape(data_shape), as_tuple(indices)],
        None,
    )


def as_tuple(indices: relax.Expr | Sequence[relax.Expr]) -> relax.Expr:
    """Convert a sequence of index tensors to a tuple expression; return an expression unchanged."""
    return indices if isinstance(indices, relax.Expr) else relax.Tuple(list(indices))


def int64_like(index: relax.TensorType, name: str = "indices") -> relax.Var:
    """Return a stand-in variable for an index tensor, of dtype int64 if the dtype is an integer."""
    dtype = dtype_of(index)
    kind = "int64" if dtype.startswith(("int", "uint")) else dtype
    return relax.Var(name, type_of_shape(index, index.shape, index.ndim, kind))


def tuple_of_tensors(call: relax.Call, index: int, name: str) -> list[relax.TensorType]:
    """Return the element types of an argument that is a tuple of tensors.

    Raises
    ------
    TypeError
        If the argument is not a tuple of tensors.
    """
    fields = getattr(call.args[index].ty, "fields", None)
    if not fields or not all(isinstance(field, relax.TensorType) for field in fields):
        raise TypeError(
            f"{call.op.name}: {name} must be a tuple of one or more tensors, but its type is "
            f"{call.args[index].ty}"
        )
    return list(fields)


def points_type(
    call: relax.Call,
    ctx: relax.BlockBuilder,
    data: relax.Expr,
    indices: relax.TensorType | list[relax.TensorType],
) -> relax.TensorType:
    """Return the type that gather_nd (one index tensor) or index_tensor (a list) infers for the
    data."""
    return forward_type(call, ctx, _points(call, data, indices))


def _points(
    call: relax.Call, data: relax.Expr, indices: relax.TensorType | list[relax.TensorType]
) -> relax.Call:
    """Return the call of gather_nd or index_tensor."""
    if isinstance(indices, list):
        fields = [int64_like(field, f"index{i}") for i, field in enumerate(indices)]
        return relax.op.index_tensor(data, fields)
    batch_dims = getattr(call.attrs, "batch_dims", 0)
    return relax.op.gather_nd(data, int64_like(indices), int(batch_dims))


def _infer_gather_nd_jvp(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    tensor_type(call, 0, "data_direction")
    return points_type(call, ctx, call.args[0], tensor_type(call, 1, "indices"))


def _infer_index_tensor_jvp(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    tensor_type(call, 0, "data_direction")
    return points_type(call, ctx, call.args[0], tuple_of_tensors(call, 1, "indices"))


def _infer_gather_nd_backward(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    return _infer_backward(call, ctx, tensor_type(call, 2, "indices"))


def _infer_index_tensor_backward(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    return _infer_backward(call, ctx, tuple_of_tensors(call, 2, "indices"))


def _infer_backward(
    call: relax.Call, ctx: relax.BlockBuilder, indices: relax.TensorType | list[relax.TensorType]
) -> relax.Type:
    return infer_data(call, ctx, lambda data: _points(call, data, indices))


_DIRECTION = ("data_direction", "Tensor", "The direction, of the shape of the data.")
_OUTPUT_GRAD = ("output_grad", "Tensor", "The gradient with respect to the result.")
_DATA_SHAPE = ("data_shape", "Shape", "The shape of the data.")
_INDICES = ("indices", "Tensor", "The indices.")
_INDEX_TENSORS = ("indices", "Tuple", "The index tensors.")

declare_op(
    "gather_nd_jvp",
    [_DIRECTION, _INDICES],
    _infer_gather_nd_jvp,
    gather_nd_jvp,
    "relax.attrs.GatherNDAttrs",
)
declare_op(
    "gather_nd_backward_data",
    [_OUTPUT_GRAD, _DATA_SHAPE, _INDICES],
    _infer_gather_nd_backward,
    gather_nd_backward_data,
    "relax.attrs.GatherNDAttrs",
)
declare_op(
    "index_tensor_jvp", [_DIRECTION, _INDEX_TENSORS], _infer_index_tensor_jvp, index_tensor_jvp
)
declare_op(
    "index_tensor_backward_data",
    [_OUTPUT_GRAD, _DATA_SHAPE, _INDEX_TENSORS],
    _infer_index_tensor_backward,
    index_tensor_backward_data,
)
