"""The adjoint of a variable: the sum of the contributions of its uses, for each tensor that it
holds."""

from __future__ import annotations

from tvm import relax

from ..activity import holds_floats
from ..ir.bindings import element
from ..ir.compat import dtype_of
from ..ir.partials import is_no_grad

#: Expressions that compute nothing, so their types are known.
_NAMED = (relax.Var, relax.TupleGetItem, relax.Tuple)


class Adjoint:
    """The contributions to the adjoint of a variable or of an element of a tuple.

    Contributions are collected, and added only when the sum is needed, so an unused adjoint emits
    nothing. An element of a tuple without contributions becomes zeros only when the whole tuple is
    needed.

    Parameters
    ----------
    expr : relax.Expr
        The variable, or the element.
    kind : relax.Type
        Its type.
    """

    def __init__(self, expr: relax.Expr, kind: relax.Type):
        self.expr, self.type = expr, kind
        self._terms: list[relax.Expr] = []
        self._fields: list[Adjoint] | None = None

    def field(self, bb: relax.BlockBuilder, index: int) -> Adjoint:
        """Return the adjoint of an element of a tuple."""
        return self._spread(bb)[index]

    def add(self, bb: relax.BlockBuilder, partial: relax.Expr) -> None:
        """Add a contribution of the type of the variable."""
        if is_no_grad(partial) or self._is_filler(partial):
            return
        is_whole = not isinstance(partial, relax.Tuple) and not self._terms
        if isinstance(self.type, relax.TupleType) and (self._fields is not None or not is_whole):
            _add_each(bb, self._spread(bb), partial)
        else:
            self._terms.append(partial)

    def _is_filler(self, partial: relax.Expr) -> bool:
        """Tell whether a contribution is the placeholder of a non-floating-point element of a
        tuple.

        Quantized integers have an adjoint, which holds floats.
        """
        if isinstance(self.type, relax.TupleType) or holds_floats(self.type):
            return False
        return isinstance(partial, _NAMED) and not holds_floats(partial.ty)

    def total(self, bb: relax.BlockBuilder, name: str) -> relax.Expr | None:
        """Return the sum of the contributions, a variable or a tuple; None if there are none."""
        if self._fields is not None:
            totals = [field.total(bb, f"{name}_{i}") for i, field in enumerate(self._fields)]
            if all(total is None for total in totals):
                return None
            return relax.Tuple(
                [
                    field.zeros(bb) if total is None else total
                    for field, total in zip(self._fields, totals, strict=True)
                ]
            )
        if not self._terms:
            return None
        total, *others = self._terms
        if not isinstance(total, relax.Var):
            total = bb.emit(total, name)
        for term in others:
            total = bb.emit(relax.op.add(total, term), name)
        self._terms = [total]
        return total

    def parts(self, bb: relax.BlockBuilder, name: str) -> list[tuple[tuple[int, ...], relax.Expr]]:
        """Return the sums of the elements with contributions, each with its path of indices."""
        if self._fields is None:
            total = self.total(bb, name)
            return [] if total is None else [((), total)]
        return [
            ((i, *path), total)
            for i, field in enumerate(self._fields)
            for path, total in field.parts(bb, f"{name}_{i}")
        ]

    def _spread(self, bb: relax.BlockBuilder) -> list[Adjoint]:
        """Return the adjoints of the elements of a tuple; contributions to the whole are
        distributed to them."""
        if self._fields is None:
            self._fields = [
                Adjoint(element(self.expr, i), kind) for i, kind in enumerate(self.type.fields)
            ]
            whole, self._terms = self._terms, []
            for partial in whole:
                _add_each(bb, self._fields, partial)
        return self._fields

    def zeros(self, bb: relax.BlockBuilder) -> relax.Expr:
        """Return zeros of the type of the variable; an empty tuple instead of a non-tensor."""
        kind = self.type
        if isinstance(kind, relax.TupleType):
            return relax.Tuple([field.zeros(bb) for field in self._spread(bb)])
        if not isinstance(kind, relax.TensorType):
            return relax.Tuple([])
        if isinstance(kind.shape, relax.ShapeExpr):
            return bb.emit(relax.op.zeros(kind.shape, dtype_of(kind)))
        return bb.emit(relax.op.zeros_like(self.expr))


def adjoint_type(kind: relax.Type) -> relax.Type:
    """Return the type of the adjoint of a value: its own, with empty tuples instead of
    non-tensors."""
    if isinstance(kind, relax.TupleType):
        return relax.TupleType([adjoint_type(field) for field in kind.fields])
    # An object may be a tensor.
    return kind if isinstance(kind, (relax.TensorType, relax.ObjectType)) else relax.TupleType([])


def _add_each(bb: relax.BlockBuilder, fields: list[Adjoint], partial: relax.Expr) -> None:
    """Add the elements of a tuple to the adjoints of the corresponding fields."""
    if not isinstance(partial, (relax.Tuple, relax.Var)):
        partial = bb.emit(partial)
    for i, field in enumerate(fields):
        field.add(bb, element(partial, i))
