"""The results of ``If`` nodes whose condition is known at run time."""

from __future__ import annotations

from tvm import relax, tirx

from ....ir.compat import dtype_of
from .converters import Builder, Refused


def check_is_tensor(result: object) -> None:
    """Refuse an optional value that is not there, as a node of a branch."""
    if not isinstance(result, relax.Expr):
        raise Refused(
            "it is a value that is not there, in a branch whose condition is known only at run "
            "time; give the condition: constants={...}"
        )


def with_extents(bb: Builder, name: str, value: relax.Var) -> relax.Var:
    """Return a result with symbols instead of the extents that differ between the branches.

    Parameters
    ----------
    bb : relax.BlockBuilder
        The builder, which has bound the result.
    name : str
        The name of the result.
    value : relax.Var
        The result of an ``If``, or a field of it.
    """
    kinds = _kinds_of_branches(bb, value)
    if not all(isinstance(kind, relax.TensorType) for kind in kinds):
        return value
    first, second = kinds
    if dtype_of(first) != dtype_of(second) or first.ndim != second.ndim:
        raise Refused(
            f"its branches return {name!r} as {first} and as {second}; both must have the same "
            "dtype and number of axes"
        )
    if isinstance(value.ty.shape, relax.ShapeExpr) or first.ndim < 0:
        return value
    extents = [
        tirx.Var(f"{name}_{axis}", "int64") if extent is None else extent
        for axis, extent in enumerate(_common_extents(first, second))
    ]
    return bb.match_cast(value, relax.TensorType(extents, dtype_of(first)))


def _kinds_of_branches(bb: Builder, value: relax.Var) -> list[relax.Type]:
    bound, index = bb.lookup_binding(value), None
    if isinstance(bound, relax.TupleGetItem):
        bound, index = bb.lookup_binding(bound.tuple_value), bound.index
    kinds = [branch.ty for branch in (bound.true_branch, bound.false_branch)]
    return kinds if index is None else [kind.fields[index] for kind in kinds]


def _common_extents(first: relax.TensorType, second: relax.TensorType) -> list:
    """Return the extents that are numbers and equal; None for others."""
    shapes = [kind.shape for kind in (first, second)]
    if not all(isinstance(shape, relax.ShapeExpr) for shape in shapes):
        return [None] * first.ndim
    pairs = zip(*(shape.values for shape in shapes), strict=True)
    return [_common(one, other) for one, other in pairs]


def _common(one: tirx.Expr, other: tirx.Expr) -> tirx.Expr | None:
    is_same = one.same_as(other) or (
        isinstance(one, tirx.IntImm) and isinstance(other, tirx.IntImm) and int(one) == int(other)
    )
    return one if is_same else None
