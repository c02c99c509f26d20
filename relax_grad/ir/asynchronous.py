"""Collectives that run beside later calls: a call that starts one, and a call that waits for its
result.

The compiled function calls two functions of the runtime. ``start_allreduce`` copies its operand,
and returns a tensor that has no values yet, which only ``wait`` may take. ``wait`` returns the same
tensor with its values. Both count as pure: the order of a start and its wait is that of a producer
and its consumer, and the runtime owns the memory. Passes may move a start as any call, and a wait
to a later place only, because a worker computes nothing while it waits.
"""

from __future__ import annotations

from tvm import relax
from tvm.ir import Op

#: The names of the functions.
START, WAIT = "relax_grad.distributed.start_allreduce", "relax_grad.distributed.wait"

#: The workers among which a tensor is reduced: all, or those of the same place in each group.
WORLD, PEERS = "world", "peers"

_CALL = Op.get("relax.call_pure_packed")


def start_allreduce(x: relax.Expr, kind: str, *, of_peers: bool = False) -> relax.Call:
    """Return the call that starts a reduction of a tensor over workers.

    Parameters
    ----------
    x : relax.Expr
        The worker's tensor, of constant shape.
    kind : str
        ``"sum"``, ``"prod"``, ``"min"``, ``"max"`` or ``"avg"``.
    of_peers : bool
        Whether the tensor is reduced over the workers that have the same place in each group, and
        not over all workers.
    """
    among = PEERS if of_peers else WORLD
    return relax.op.call_pure_packed(START, x, kind, among, ty_args=x.ty)


def wait(started: relax.Expr) -> relax.Call:
    """Return the call that waits for the result of a call of :func:`start_allreduce`."""
    return relax.op.call_pure_packed(WAIT, started, ty_args=started.ty)


def is_start(value: relax.Expr) -> bool:
    """Tell whether a value is a call of :func:`start_allreduce`, before or after the lowering of
    packed calls."""
    return _calls(value, START)


def is_wait(value: relax.Expr) -> bool:
    """Tell whether a value is a call of :func:`wait`, before or after the lowering of packed
    calls."""
    return _calls(value, WAIT)


def _calls(value: relax.Expr, name: str) -> bool:
    if type(value) is not relax.Call:
        return False
    callee = value.args[0] if value.op.same_as(_CALL) else value.op
    return type(callee) is relax.ExternFunc and callee.global_symbol == name


__all__ = ["PEERS", "START", "WAIT", "WORLD", "is_start", "is_wait", "start_allreduce", "wait"]
