"""Gradients of collective communication.

Every worker runs the same program, and the same program of gradients, on its own tensors. The
differentiated function is the sum of the workers' functions. So the gradient of a tensor on a
worker is the derivative of that sum with respect to the worker's own copy. Copies that must stay
equal need the sum of their gradients: ``ccl.allreduce``. The gradient of a collective is a
collective. Every worker must execute it at the same point of its program.
"""

from __future__ import annotations

from tvm import relax
from tvm.relax import op
from tvm.relax.op import grad as backward

from ..errors import GradientError
from ..registry import register_gradient
from ._util import float_only, shape_arg, zero


@register_gradient("relax.ccl.allreduce")
@float_only
def allreduce(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of ccl.allreduce.

    Forward form: ``y = ccl.allreduce(x, op_type, in_group)``.

    Backward form: for "sum" and "avg" ``[ccl.allreduce(y_grad, op_type, in_group)]``; for "min" and
    "max" the sum of ``y_grad`` over the workers, shared evenly by the workers whose ``x`` is ``y``.
    "prod" is an error: no composition of collectives is correct where an ``x`` is 0.
    """
    (x,) = orig_call.args
    op_type, in_group = str(orig_call.attrs.op_type), bool(orig_call.attrs.in_group)
    if op_type in ("sum", "avg"):
        return [op.ccl.allreduce(output_grad, op_type, in_group)]
    if op_type in ("min", "max"):
        chosen = op.equal(x, orig_var)
        share = op.where(chosen, op.ones_like(x), op.zeros_like(x))
        count = op.ccl.allreduce(share, "sum", in_group)
        total = op.ccl.allreduce(output_grad, "sum", in_group)
        return [op.where(chosen, total / count, zero(x))]
    raise GradientError(
        f"allreduce has a gradient for sum, avg, min and max, not for {op_type!r}; a product of "
        "positive numbers is exp(allreduce(log(x), 'sum'))"
    )


@register_gradient("relax.ccl.allgather")
@float_only
def allgather(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of ccl.allgather.

    Forward form: ``y = ccl.allgather(x, num_workers, in_group)``.

    Backward form: ``[allgather_backward_x(y_grad, x.shape, num_workers, in_group)]``: each worker
    takes its own shard of the sum of the workers' gradients. The workers of a group have
    consecutive numbers.
    """
    (x,) = orig_call.args
    attrs = orig_call.attrs
    return [
        backward.allgather_backward_x(
            output_grad, shape_arg(x), int(attrs.num_workers), bool(attrs.in_group)
        )
    ]


@register_gradient("relax.ccl.broadcast_from_worker0")
@float_only
def broadcast_from_worker0(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of ccl.broadcast_from_worker0.

    Forward form: ``y = ccl.broadcast_from_worker0(x)``.

    Backward form: ``[broadcast_from_worker0_backward_x(y_grad)]``: the sum of the workers'
    gradients on worker 0, and 0 on the others, where ``x`` is not read.
    """
    return [backward.broadcast_from_worker0_backward_x(output_grad)]


@register_gradient("relax.ccl.scatter_from_worker0")
@float_only
def scatter_from_worker0(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of ccl.scatter_from_worker0.

    Forward form: ``y = ccl.scatter_from_worker0(x, num_workers, axis)``.

    Backward form: ``[scatter_from_worker0_backward_x(y_grad, x.shape, num_workers, axis)]``: the
    workers' gradients concatenated on worker 0, and 0 on the others, where ``x`` is not read.
    """
    (x,) = orig_call.args
    attrs = orig_call.attrs
    return [
        backward.scatter_from_worker0_backward_x(
            output_grad, shape_arg(x), int(attrs.num_workers), int(attrs.axis)
        )
    ]


@register_gradient("relax.dist.redistribute_replica_to_shard")
@float_only
def redistribute_replica_to_shard(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of dist.redistribute_replica_to_shard.

    Forward form: ``y = dist.redistribute_replica_to_shard(x, num_workers, axis)``, the worker's own
    shard of its own ``x``.

    Backward form: ``[redistribute_replica_to_shard_backward_input(y_grad, x.shape, num_workers,
    axis)]``: the gradient at the worker's own shard, and 0 elsewhere.
    """
    (x,) = orig_call.args
    attrs = orig_call.attrs
    return [
        backward.redistribute_replica_to_shard_backward_input(
            output_grad, shape_arg(x), int(attrs.num_workers), int(attrs.axis)
        )
    ]


@register_gradient("relax.dist.annotate_sharding")
def annotate_sharding(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of dist.annotate_sharding.

    Forward form: ``y = dist.annotate_sharding(x, device_mesh, placement)``, which is ``x``.

    Backward form: ``[dist.annotate_sharding(y_grad, device_mesh, placement)]``: a gradient has the
    placement of its tensor.
    """
    return [relax.Call(orig_call.op, [output_grad], orig_call.attrs)]
