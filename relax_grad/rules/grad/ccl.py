"""Gradients of the backward operators of collective communication: the forward operators."""

from __future__ import annotations

from tvm.relax import op
from tvm.relax.op import grad as backward

from .._linear import register_linear

register_linear(
    "allgather_backward_x",
    "dx = allgather_backward_x(dy, x.shape, num_workers, in_group)",
    "ccl.allgather(dx_grad, num_workers, in_group)",
    lambda grad, call: op.ccl.allgather(
        grad, int(call.attrs.num_workers), bool(call.attrs.in_group)
    ),
)
register_linear(
    "broadcast_from_worker0_backward_x",
    "dx = broadcast_from_worker0_backward_x(dy)",
    "ccl.broadcast_from_worker0(dx_grad)",
    lambda grad, call: op.ccl.broadcast_from_worker0(grad),
)
register_linear(
    "scatter_from_worker0_backward_x",
    "dx = scatter_from_worker0_backward_x(dy, x.shape, num_workers, axis)",
    "ccl.scatter_from_worker0(dx_grad, num_workers, axis)",
    lambda grad, call: op.ccl.scatter_from_worker0(
        grad, int(call.attrs.num_workers), int(call.attrs.axis)
    ),
)
register_linear(
    "redistribute_replica_to_shard_backward_input",
    "dx = redistribute_replica_to_shard_backward_input(dy, x.shape, num_workers, axis)",
    "dist.redistribute_replica_to_shard(dx_grad, num_workers, axis)",
    lambda grad, call: op.distributed.redistribute_replica_to_shard(
        grad, int(call.attrs.num_workers), int(call.attrs.axis)
    ),
)
register_linear(
    "copy_to_tensor_parallel",
    "y = copy_to_tensor_parallel(x)",
    "reduce_from_tensor_parallel(y_grad)",
    lambda grad, call: backward.reduce_from_tensor_parallel(grad),
)
register_linear(
    "reduce_from_tensor_parallel",
    "y = reduce_from_tensor_parallel(x)",
    "copy_to_tensor_parallel(y_grad)",
    lambda grad, call: backward.copy_to_tensor_parallel(grad),
    note="The sum is one value that all workers have, so its gradient counts once.",
)
