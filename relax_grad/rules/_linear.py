"""Gradients of operators that are linear in one argument: their transposes."""

from __future__ import annotations

from collections.abc import Callable

from tvm import relax

from ..op.rank import named
from ..registry import register_gradient
from ._util import cast_like, no_grad, widen

#: Takes the gradient with respect to the result, and the call; returns the gradient with respect to
#: the argument.
Transpose = Callable[[relax.Expr, relax.Call], relax.Expr]


def register_linear(
    op_name: str,
    forward: str,
    backward: str,
    transpose: Transpose,
    *,
    accumulates: bool = False,
    note: str = "",
) -> None:
    """Register the gradient of an operator that is linear in its first argument.

    The other arguments get no gradient: shapes, indices, and tensors of which only the shape or the
    positions of the largest elements matter.

    Parameters
    ----------
    op_name : str
        The operator, without ``relax.grad.``.
    forward : str
        The operator as a formula.
    backward : str
        The gradient with respect to the first argument as a formula.
    transpose : Callable
        The transpose of the operator: takes the gradient with respect to the result, and the call.
    accumulates : bool
        Whether the transpose sums elements. If so, half precision is cast to float32 first.
    note : str
        A sentence for the docstring of the rule.

    Notes
    -----
    JAX declares such primitives by ``deflinear``.
    """

    def rule(
        orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
    ) -> list[relax.Expr]:
        """Gradient of {operator}.

        Forward form: ``{forward}``.

        Backward form: ``[{backward}, no_grad, ...]``{more}
        """
        first, *others = orig_call.args
        partial = transpose(widen(output_grad) if accumulates else output_grad, orig_call)
        if isinstance(first.ty, relax.TensorType):
            partial = cast_like(ctx, partial, first)
        return [partial, *map(no_grad, others)]

    more = ", accumulated in float32 at least." if accumulates else "."
    more += f" {note}" if note else ""
    named(rule, op_name, operator=op_name, forward=forward, backward=backward, more=more)
    register_gradient(f"relax.grad.{op_name}")(rule)
