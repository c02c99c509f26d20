"""The backward operators of linear algebra, and the parser of einsum's subscripts."""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Sequence

from tvm import relax
from tvm.ir import Op

from ._infer import (
    infer_data,
    shape_values,
    unused,
)
from .declare import Shape, as_shape, declare_op


def einsum_labels(subscripts: str, ndims: Sequence[int]) -> tuple[list[str], str]:
    """Expand the subscripts of einsum to one letter for each axis.

    Parameters
    ----------
    subscripts : str
        As given to ``relax.op.einsum``; with or without ``->``, ellipses and spaces.
    ndims : Sequence[int]
        The number of dimensions of each operand.

    Returns
    -------
    labels : list[str]
        The letters of the axes of each operand. The axes of an ellipsis are right-aligned and have
        letters that occur nowhere else.
    output : str
        The letters of the axes of the result.

    Raises
    ------
    ValueError
        If the subscripts do not fit the operands, or the result has a letter twice, or a letter
        that no operand has.
    """
    inputs, arrow, output = subscripts.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if len(terms) != len(ndims):
        raise ValueError(
            f"einsum {subscripts!r} takes {len(terms)} operands, but there are {len(ndims)}"
        )
    named = Counter(inputs.replace("...", "").replace(",", ""))
    hidden = [
        ndim - len(term) + 3 if "..." in term else 0
        for term, ndim in zip(terms, ndims, strict=True)
    ]
    fresh = [letter for letter in string.ascii_letters if letter not in named][: max(hidden)]
    if not arrow:
        output = "..." + "".join(sorted(letter for letter, times in named.items() if times == 1))
    labels = [
        term.replace("...", "".join(fresh[len(fresh) - count :]))
        for term, count in zip(terms, hidden, strict=True)
    ]
    output = output.replace("...", "".join(fresh))
    if min(hidden) < 0 or list(map(len, labels)) != list(ndims):
        raise ValueError(
            f"einsum {subscripts!r} does not match operands of {list(ndims)} dimensions"
        )
    if len(set(output)) != len(output) or not set(output) <= set("".join(labels)):
        raise ValueError(
            f"einsum {subscripts!r}: each letter of the result must occur in the operands, and "
            "only once in the result"
        )
    return labels, output


def einsum_backward_operand(
    output_grad: relax.Expr, operand_shape: relax.Expr | Shape, subscripts: str
) -> relax.Call:
    """Gradient of an einsum of one operand with respect to it.

    Scatters the gradient to the diagonal of letters that occur several times in the operand, and
    broadcasts it along the axes that were summed.

    Parameters
    ----------
    output_grad : relax.Expr
        The gradient with respect to the result of ``einsum((operand,), subscripts)``.
    operand_shape : relax.Expr or Sequence[int or PrimExpr]
        The shape of the operand.
    subscripts : str
        As given to ``relax.op.einsum``.

    Returns
    -------
    result : relax.Call
        A tensor of shape ``operand_shape`` and the dtype of ``output_grad``.
    """
    return relax.Call(
        Op.get("relax.grad.einsum_backward_operand"),
        [output_grad, as_shape(operand_shape)],
        relax.op.einsum((unused(),), subscripts).attrs,
    )


def _infer_einsum(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    if shape_values(call, 1, "operand_shape") is not None:
        try:
            einsum_labels(str(call.attrs.subscripts), [call.args[1].ty.ndim])
        except ValueError as error:
            raise ValueError(f"{call.op.name}: {error}") from error

    def forward(operand: relax.Var) -> relax.Call:
        return relax.Call(Op.get("relax.einsum"), [relax.Tuple([operand])], call.attrs)

    return infer_data(call, ctx, forward, "operand_shape", if_known=True)


declare_op(
    "einsum_backward_operand",
    [
        ("output_grad", "Tensor", "The gradient with respect to the result of einsum."),
        ("operand_shape", "Shape", "The shape of the operand."),
    ],
    _infer_einsum,
    einsum_backward_operand,
    "relax.attrs.EinsumAttrs",
)
