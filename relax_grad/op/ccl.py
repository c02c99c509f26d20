"""The backward operators of collective communication.

Each is the transpose of a forward operator that behaves differently on each worker, and is linear
in the output gradient. On each worker it returns the gradient of the sum of all workers' functions.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import relax
from tvm.ir import Op

from ._infer import infer_data, tensor_type, unused
from .declare import Shape, as_shape, declare_op


def allgather_backward_x(
    output_grad: relax.Expr,
    x_shape: relax.Expr | Shape,
    num_workers: int,
    in_group: bool = True,
) -> relax.Call:
    """Gradient of ccl.allgather: the worker's own shard of the sum of the workers' gradients.

    Parameters
    ----------
    output_grad : relax.Expr
        The gradient with respect to the result of ``ccl.allgather(x, num_workers, in_group)``.
    x_shape : relax.Expr or Sequence[int or PrimExpr]
        The shape of ``x``.
    num_workers, in_group
        As given to ``relax.op.ccl.allgather``.

    Returns
    -------
    result : relax.Call
        A tensor of shape ``x_shape`` and the dtype of ``output_grad``.
    """
    return relax.Call(
        Op.get("relax.grad.allgather_backward_x"),
        [output_grad, as_shape(x_shape)],
        relax.op.ccl.allgather(unused(), num_workers, in_group).attrs,
    )


def broadcast_from_worker0_backward_x(output_grad: relax.Expr) -> relax.Call:
    """Gradient of ccl.broadcast_from_worker0: the sum of the workers' gradients on worker 0,
    else 0.

    Parameters
    ----------
    output_grad : relax.Expr
        The gradient with respect to the result of ``ccl.broadcast_from_worker0(x)``.

    Returns
    -------
    result : relax.Call
        A tensor of the shape and dtype of ``output_grad``.
    """
    return relax.Call(Op.get("relax.grad.broadcast_from_worker0_backward_x"), [output_grad])


def scatter_from_worker0_backward_x(
    output_grad: relax.Expr, x_shape: relax.Expr | Shape, num_workers: int, axis: int = 0
) -> relax.Call:
    """Gradient of ccl.scatter_from_worker0: the workers' gradients concatenated on worker 0,
    else 0.

    Parameters
    ----------
    output_grad : relax.Expr
        The gradient with respect to the result of
        ``ccl.scatter_from_worker0(x, num_workers, axis)``.
    x_shape : relax.Expr or Sequence[int or PrimExpr]
        The shape of ``x``.
    num_workers, axis
        As given to ``relax.op.ccl.scatter_from_worker0``.

    Returns
    -------
    result : relax.Call
        A tensor of shape ``x_shape`` and the dtype of ``output_grad``.
    """
    return relax.Call(
        Op.get("relax.grad.scatter_from_worker0_backward_x"),
        [output_grad, as_shape(x_shape)],
        relax.op.ccl.scatter_from_worker0(unused(), num_workers, axis).attrs,
    )


def redistribute_replica_to_shard_backward_input(
    output_grad: relax.Expr, input_shape: relax.Expr | Shape, num_workers: int, axis: int
) -> relax.Call:
    """Gradient of dist.redistribute_replica_to_shard: the gradient at the worker's own shard,
    else 0.

    Parameters
    ----------
    output_grad : relax.Expr
        The gradient with respect to the result of
        ``dist.redistribute_replica_to_shard(input, num_workers, axis)``.
    input_shape : relax.Expr or Sequence[int or PrimExpr]
        The shape of the input.
    num_workers, axis
        As given to ``relax.op.dist.redistribute_replica_to_shard``.

    Returns
    -------
    result : relax.Call
        A tensor of shape ``input_shape`` and the dtype of ``output_grad``.
    """
    return relax.Call(
        Op.get("relax.grad.redistribute_replica_to_shard_backward_input"),
        [output_grad, as_shape(input_shape)],
        relax.op.distributed.redistribute_replica_to_shard(unused(), num_workers, axis).attrs,
    )


def copy_to_tensor_parallel(data: relax.Expr) -> relax.Call:
    """Pass a replicated tensor to computations that differ by worker.

    It is the identity. Its gradient is :func:`reduce_from_tensor_parallel`: each worker's
    computation contributes a part of the gradient of the one tensor that all workers have.

    Parameters
    ----------
    data : relax.Expr
        A tensor that is the same on all workers.

    Returns
    -------
    result : relax.Call
        The same tensor.

    Notes
    -----
    Megatron-LM calls it ``copy_to_tensor_model_parallel_region``, and JAX ``pvary``. The gradients
    of ``ccl.allreduce`` differentiate the sum of all workers' functions. These two operators have
    the gradients of one function, which all workers compute together: a replicated value counts
    once.
    """
    return relax.Call(Op.get("relax.grad.copy_to_tensor_parallel"), [data])


def reduce_from_tensor_parallel(data: relax.Expr) -> relax.Call:
    """Sum the parts of a tensor of the workers of a group. All of them get the sum.

    Its gradient is :func:`copy_to_tensor_parallel`, which passes the gradient of the sum on
    unchanged.

    Parameters
    ----------
    data : relax.Expr
        The worker's part, a term of the sum.

    Returns
    -------
    result : relax.Call
        The sum, of the shape and dtype of ``data``.

    Notes
    -----
    Megatron-LM calls it ``reduce_from_tensor_model_parallel_region``, and JAX ``psum_invariant``.
    """
    return relax.Call(Op.get("relax.grad.reduce_from_tensor_parallel"), [data])


def _infer_like_data(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    return tensor_type(call, 0, "data")


def _infer_like_grad(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    return tensor_type(call, 0, "output_grad")


def _declare(
    builder: Callable[..., relax.Call], forward_op: str, shape_name: str, attrs_type: str
) -> None:
    declare_op(
        builder.__name__,
        [
            ("output_grad", "Tensor", f"The gradient with respect to the result of {forward_op}."),
            (shape_name, "Shape", "The shape of the data."),
        ],
        lambda call, ctx: infer_data(call, ctx, forward_op, shape_name, if_known=True),
        builder,
        attrs_type,
    )


_declare(allgather_backward_x, "relax.ccl.allgather", "x_shape", "relax.attrs.AllGatherAttrs")
_declare(
    scatter_from_worker0_backward_x,
    "relax.ccl.scatter_from_worker0",
    "x_shape",
    "relax.attrs.ScatterCollectiveAttrs",
)
_declare(
    redistribute_replica_to_shard_backward_input,
    "relax.dist.redistribute_replica_to_shard",
    "input_shape",
    "relax.attrs.ScatterCollectiveAttrs",
)
declare_op(
    "broadcast_from_worker0_backward_x",
    [("output_grad", "Tensor", "The gradient with respect to the result of the broadcast.")],
    _infer_like_grad,
    broadcast_from_worker0_backward_x,
)
for _builder, _what in (
    (copy_to_tensor_parallel, "A tensor that is the same on all workers."),
    (reduce_from_tensor_parallel, "The worker's term of the sum."),
):
    declare_op(_builder.__name__, [("data", "Tensor", _what)], _infer_like_data, _builder)
