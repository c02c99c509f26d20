"""Bindings outside of a block builder."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax


class Emitter:
    """Bindings in their order.

    Parameters
    ----------
    params : Sequence[relax.Var]
        The parameters of the function, whose symbolic extents are not negative.

    Attributes
    ----------
    bindings : list[relax.Binding]
        The bindings up to now.
    """

    def __init__(self, params: Sequence[relax.Var] = ()):
        self.bindings: list[relax.Binding] = []
        self._builder = relax.BlockBuilder()
        if params:
            self._builder.begin_scope(list(params))

    def __call__(self, value: relax.Expr, name: str = "lv") -> relax.Var:
        """Bind a value whose operands are variables or constants, and return the variable."""
        value = self._builder.normalize(value)
        variable = relax.Var(name, value.ty)
        self.bindings.append(relax.VarBinding(variable, value))
        return variable
