"""Legalization of the backward operators of collective communication.

They are built from TVM's own collectives and the worker's number, which a call to the runtime
returns.
"""

from __future__ import annotations

from tvm import relax, tirx
from tvm.ir import Op

from ..registry import register_legalize
from ..topi import ccl as topi_ccl
from ._util import shape_values


@register_legalize("relax.grad.allgather_backward_x")
def _allgather_backward_x(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Sum over the workers, then take the worker's own shard."""
    output_grad, x_shape = call.args
    attrs = call.attrs
    total = bb.emit(relax.op.ccl.allreduce(output_grad, "sum", bool(attrs.in_group)))
    return bb.call_te(
        topi_ccl.part_of_worker,
        total,
        _worker_id(bb),
        shape_values(x_shape),
        int(attrs.num_workers),
        0,
        primfunc_name_hint="allgather_backward_x",
    )


@register_legalize("relax.grad.broadcast_from_worker0_backward_x")
def _broadcast_from_worker0_backward_x(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Sum over all workers, then keep the sum on worker 0."""
    total = bb.emit(relax.op.ccl.allreduce(call.args[0], "sum", in_group=False))
    return bb.call_te(
        topi_ccl.on_worker0,
        total,
        _worker_id(bb),
        primfunc_name_hint="broadcast_from_worker0_backward_x",
    )


@register_legalize("relax.grad.scatter_from_worker0_backward_x")
def _scatter_from_worker0_backward_x(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Gather from all workers along the axis, then keep the result on worker 0."""
    part = call.args[0]
    axis, ndim = int(call.attrs.axis), part.ty.ndim
    others = [i for i in range(ndim) if i != axis]
    if axis != 0:
        part = bb.emit(relax.op.permute_dims(part, [axis, *others]))
    whole = bb.emit(relax.op.ccl.allgather(part, int(call.attrs.num_workers), in_group=False))
    if axis != 0:
        back = sorted(range(ndim), key=[axis, *others].__getitem__)
        whole = bb.emit(relax.op.permute_dims(whole, back))
    return bb.call_te(
        topi_ccl.on_worker0,
        whole,
        _worker_id(bb),
        primfunc_name_hint="scatter_from_worker0_backward_x",
    )


@register_legalize("relax.grad.redistribute_replica_to_shard_backward_input")
def _redistribute_backward_input(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    part, input_shape = call.args
    return bb.call_te(
        topi_ccl.at_part_of_worker,
        part,
        _worker_id(bb),
        shape_values(input_shape),
        int(call.attrs.num_workers),
        int(call.attrs.axis),
        primfunc_name_hint="redistribute_replica_to_shard_backward_input",
    )


@register_legalize(
    "relax.dist.redistribute_replica_to_shard",
    corrects="slices beyond the axis on all groups of workers but the first",
)
def _redistribute_replica_to_shard(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Take the part of the worker's place in its group of ``num_workers``."""
    whole, count, axis = call.args[0], int(call.attrs.num_workers), int(call.attrs.axis)
    place = tirx.floormod(_worker_id(bb), tirx.IntImm("int64", count))
    size = tirx.floordiv(whole.ty.shape.values[axis], tirx.IntImm("int64", count))
    return relax.op.strided_slice(
        whole, [axis], [place * size], [(place + 1) * size], assume_inbound=True
    )


@register_legalize("relax.grad.copy_to_tensor_parallel")
def _copy_to_tensor_parallel(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return call.args[0]


@register_legalize("relax.grad.reduce_from_tensor_parallel")
def _reduce_from_tensor_parallel(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Reduce over the workers of the group by TVM's collective."""
    return relax.op.ccl.allreduce(call.args[0], "sum", in_group=True)


def _worker_id(bb: relax.BlockBuilder) -> tirx.Var:
    """Ask the runtime for the worker's number, as TVM does for redistribute_replica_to_shard."""
    worker = tirx.Var("worker_id", "int64")
    asked = relax.Call(
        Op.get("relax.call_pure_packed"),
        [relax.ExternFunc("runtime.disco.worker_id")],
        None,
        [relax.ShapeType(None)],
    )
    bb.match_cast(bb.emit(asked), relax.ShapeType([worker]))
    return worker
