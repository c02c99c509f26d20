"""Gradients of the backward operators of collective communication: the forward operators."""

from __future__ import annotations

from tvm import relax

from ...registry import register_gradient
from .._util import no_grad


@register_gradient("relax.grad.allgather_backward_x")
def allgather_backward_x(orig_var, orig_call, output_grad, ctx):
    """Gradient of allgather_backward_x.

    Forward form: ``dx = allgather_backward_x(dy, x.shape, num_workers, in_group)``.

    Backward form: ``[ccl.allgather(dx_grad, num_workers, in_group), no_grad]``.
    """
    attrs = orig_call.attrs
    gathered = relax.op.ccl.allgather(output_grad, int(attrs.num_workers), bool(attrs.in_group))
    return [gathered, no_grad(orig_call.args[1])]


@register_gradient("relax.grad.broadcast_from_worker0_backward_x")
def broadcast_from_worker0_backward_x(orig_var, orig_call, output_grad, ctx):
    """Gradient of broadcast_from_worker0_backward_x.

    Forward form: ``dx = broadcast_from_worker0_backward_x(dy)``.

    Backward form: ``[ccl.broadcast_from_worker0(dx_grad)]``.
    """
    return [relax.op.ccl.broadcast_from_worker0(output_grad)]


@register_gradient("relax.grad.scatter_from_worker0_backward_x")
def scatter_from_worker0_backward_x(orig_var, orig_call, output_grad, ctx):
    """Gradient of scatter_from_worker0_backward_x.

    Forward form: ``dx = scatter_from_worker0_backward_x(dy, x.shape, num_workers, axis)``.

    Backward form: ``[ccl.scatter_from_worker0(dx_grad, num_workers, axis), no_grad]``.
    """
    attrs = orig_call.attrs
    part = relax.op.ccl.scatter_from_worker0(output_grad, int(attrs.num_workers), int(attrs.axis))
    return [part, no_grad(orig_call.args[1])]


@register_gradient("relax.grad.redistribute_replica_to_shard_backward_input")
def redistribute_replica_to_shard_backward_input(orig_var, orig_call, output_grad, ctx):
    """Gradient of redistribute_replica_to_shard_backward_input.

    Forward form: ``dx = redistribute_replica_to_shard_backward_input(dy, x.shape, num_workers, axis)``.

    Backward form: ``[dist.redistribute_replica_to_shard(dx_grad, num_workers, axis), no_grad]``.
    """
    attrs = orig_call.attrs
    part = relax.op.distributed.redistribute_replica_to_shard(
        output_grad, int(attrs.num_workers), int(attrs.axis)
    )
    return [part, no_grad(orig_call.args[1])]
