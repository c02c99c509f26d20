"""Gradients of bindings of an unfinished function, emitted after them."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax

from ..activity import varied
from ..ir.bindings import expanded
from ..ir.module import adjoint_name
from ..tir.call import TensorFunctions
from ._checks import check_gradients
from ._reverse import Reverse
from .obstacles import obstacles


def emit_gradients(
    bb: relax.BlockBuilder,
    bindings: Sequence[relax.Binding],
    outputs: Sequence[relax.Var],
    cotangents: Sequence[relax.Expr],
    inputs: Sequence[relax.Var],
) -> list[relax.Expr]:
    """Emit a vector-Jacobian product, and return the gradient of each input.

    Parameters
    ----------
    bb : relax.BlockBuilder
        The builder, whose open block has the bindings.
    bindings : Sequence[relax.Binding]
        All bindings between the inputs and the outputs, in order.
    outputs, cotangents : Sequence
        The differentiated variables and their cotangents.
    inputs : Sequence[relax.Var]
        The variables to differentiate with respect to.

    Raises
    ------
    GradientError
        If an operator on the path has no gradient.
    """
    functions, every = TensorFunctions(bb.get()), list(expanded(bindings))
    active = varied(every, inputs)
    missing = obstacles(every, active, relax.Tuple(list(outputs)), (), functions)
    check_gradients(missing, "the part of the function")
    reverse = Reverse(bb, active, functions=functions)
    for output, cotangent in zip(outputs, cotangents, strict=True):
        reverse.add(output, cotangent)
    reverse.walk(bindings)
    gradients = []
    for variable in inputs:
        adjoint = reverse.adjoint(variable)
        total = adjoint.total(bb, adjoint_name(variable))
        gradients.append(adjoint.zeros(bb) if total is None else total)
    return gradients
