"""Collectives that R.ccl does not have: collectives that overlap with later calls, with a call that
starts one and a call that waits for its result, and collectives of the workers with the same place
in each group.

The compiled function calls two functions of the runtime. ``start_allreduce`` copies its operands,
and returns a tuple of tensors that have no values yet, which only ``wait`` may take. ``wait``
returns the same tensors with their values. Both count as pure: a start and its wait are ordered as
a producer and its consumer, and the runtime owns the memory. Passes may move a start as any call,
and a wait to a later place only, because a worker computes nothing while it waits.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax
from tvm.ir import Op

from .compat import dtype_of

#: The names of the functions.
START, WAIT = "relax_grad.distributed.start_allreduce", "relax_grad.distributed.wait"
PART = "relax_grad.distributed.part_of_peer"
GATHER = "relax_grad.distributed.gather_of_peers"

#: The workers among which a tensor is reduced: all, or the workers of the same place in each group.
WORLD, PEERS = "world", "peers"

#: The number of arguments of a start before the tensors.
_OPTIONS = 2

_CALL = Op.get("relax.call_pure_packed")


def start_allreduce(
    tensors: Sequence[relax.Expr], kind: str, *, of_peers: bool = False
) -> relax.Call:
    """Return the call that starts one reduction of several tensors over workers.

    Parameters
    ----------
    tensors : Sequence[relax.Expr]
        The worker's tensors, of one dtype and of constant shapes.
    kind : str
        ``"sum"``, ``"prod"``, ``"min"``, ``"max"`` or ``"avg"``.
    of_peers : bool
        Whether the tensors are reduced over the workers that have the same place in each group, and
        not over all workers.
    """
    among = PEERS if of_peers else WORLD
    kinds = relax.TupleType([tensor.ty for tensor in tensors])
    return relax.op.call_pure_packed(START, kind, among, *tensors, ty_args=kinds)


def wait(started: relax.Expr) -> relax.Call:
    """Return the call that waits for the results of a call of :func:`start_allreduce`."""
    return relax.op.call_pure_packed(WAIT, started, ty_args=started.ty)


def part_of_peer(flat: relax.Expr, count: int) -> relax.Call:
    """Return the call for the worker's part of a vector that is divided equally among the workers
    of the same place in each of ``count`` groups."""
    kind = relax.TensorType((int(flat.ty.shape.values[0]) // count,), dtype_of(flat.ty))
    return relax.op.call_pure_packed(PART, flat, ty_args=kind)


def gather_of_peers(part: relax.Expr, count: int) -> relax.Call:
    """Return the call for the vector whose parts the workers of :func:`part_of_peer` have."""
    kind = relax.TensorType((int(part.ty.shape.values[0]) * count,), dtype_of(part.ty))
    return relax.op.call_pure_packed(GATHER, part, ty_args=kind)


def is_start(value: relax.Expr) -> bool:
    """Tell whether a value is a call of :func:`start_allreduce`, before or after the lowering of
    packed calls."""
    return _calls(value, START)


def started_by(value: relax.Call) -> list[relax.Expr]:
    """Return the tensors of a call of :func:`start_allreduce`."""
    return list(value.args[1 + _OPTIONS :])


def is_wait(value: relax.Expr) -> bool:
    """Tell whether a value is a call of :func:`wait`, before or after the lowering of packed
    calls."""
    return _calls(value, WAIT)


def _calls(value: relax.Expr, name: str) -> bool:
    if type(value) is not relax.Call:
        return False
    callee = value.args[0] if value.op.same_as(_CALL) else value.op
    return type(callee) is relax.ExternFunc and callee.global_symbol == name


__all__ = [
    "GATHER",
    "PART",
    "PEERS",
    "START",
    "WAIT",
    "WORLD",
    "gather_of_peers",
    "is_start",
    "is_wait",
    "part_of_peer",
    "start_allreduce",
    "started_by",
    "wait",
]
