"""Attention whose keys and values are repeated for the heads of queries that share them."""

from __future__ import annotations

from collections.abc import Mapping

from tvm import relax, tirx
from tvm.ir import Op
from tvm.relax import op

from ._moves import with_extents
from ._shapes import are_equal_shapes, extents_of, is_one

#: The operators whose keys and values may have fewer heads than their queries.
ATTENTIONS = tuple(
    map(
        Op.get,
        ("relax.nn.attention", "relax.nn.attention_bias", "relax.grad.attention_dropout"),
    )
)

_PERMUTE, _RESHAPE = Op.get("relax.permute_dims"), Op.get("relax.reshape")
_REPEAT, _BROADCAST = Op.get("relax.repeat"), Op.get("relax.broadcast_to")

#: The axis of heads.
_HEADS = 2


def without_repeats(call: relax.Call, values: Mapping[relax.Var, relax.Expr]) -> relax.Call:
    """Return an attention that reads keys and values before they are repeated: each head of them
    is shared by as many heads of queries.

    Parameters
    ----------
    call : relax.Call
        An operator of :data:`ATTENTIONS`.
    values : Mapping[relax.Var, relax.Expr]
        The values that variables are bound to.
    """
    sources = [_before_repeat(operand, _HEADS, values) for operand in call.args[1:3]]
    known = [source for source in sources if source is not None]
    if len(known) < 2 or known[0][1] != known[1][1]:
        return call
    key, value = (tensor for tensor, _ in known)
    return relax.Call(call.op, [call.args[0], key, value, *call.args[3:]], call.attrs)


def _before_repeat(
    expr: relax.Expr, axis: int, values: Mapping[relax.Var, relax.Expr]
) -> tuple[relax.Expr, int] | None:
    """Return a tensor before its elements are repeated along an axis, one after the other, and
    their number; None if they are not."""
    call = values.get(expr) if isinstance(expr, relax.Var) else expr
    if not isinstance(call, relax.Call):
        return None
    if call.op == _PERMUTE:
        if call.attrs.axes is None:
            return None
        # An operand within another call has no type yet.
        rank = len(call.attrs.axes)
        axes = [int(place) % rank for place in call.attrs.axes]
        source = _before_repeat(call.args[0], axes[axis], values)
        return None if source is None else (op.permute_dims(source[0], axes), source[1])
    if call.op == _REPEAT and call.attrs.axis is not None:
        data, count = call.args[0], int(call.attrs.repeats)
        return (data, count) if int(call.attrs.axis) % data.ty.ndim == axis else None
    if call.op == _RESHAPE:
        return _before_joined(call, axis, values)
    if call.op == _BROADCAST:
        data = call.args[0]
        extents, full = extents_of(data), extents_of(call)
        if full is not None and _is_repeat(extents, full, axis):
            return data, int(full[axis])
    return None


def _before_joined(
    call: relax.Call, axis: int, values: Mapping[relax.Var, relax.Expr]
) -> tuple[relax.Expr, int] | None:
    """Return a tensor before a broadcast of an axis that a reshape joins with the axis before."""
    source = values.get(call.args[0]) if isinstance(call.args[0], relax.Var) else call.args[0]
    if not isinstance(source, relax.Call) or source.op != _BROADCAST:
        return None
    joined, full, extents = map(extents_of, (call, source, source.args[0]))
    if joined is None or full is None or not _is_repeat(extents, full, axis + 1):
        return None
    rest = [*full[:axis], *full[axis + 2 :]]
    if not are_equal_shapes(rest, [*joined[:axis], *joined[axis + 1 :]]):
        return None
    wanted = [*full[: axis + 1], *full[axis + 2 :]]
    return with_extents(source.args[0], wanted, values), int(full[axis + 1])


def _is_repeat(extents: list | None, full: list | None, axis: int) -> bool:
    """Tell whether a broadcast repeats one element along an axis of known extent, and no other."""
    if extents is None or full is None or len(extents) != len(full) or axis >= len(full):
        return False
    others = [*extents[:axis], *extents[axis + 1 :]], [*full[:axis], *full[axis + 1 :]]
    return (
        is_one(extents[axis]) and isinstance(full[axis], tirx.IntImm) and are_equal_shapes(*others)
    )
