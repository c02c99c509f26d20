"""Helpers that the legalizations share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tvm import relax, tirx
from tvm.ir import Op

from ..ir.compat import dtype_of
from ..registry import LegalizeRule
from ..topi import util as topi_util

#: The error in TVM's legalization of data-movement operators that :func:`zeros` avoids.
EMPTY = (
    "does not compile for an empty tensor: a later pass reads the extent 0 as 'copy from the data'"
)


def stock(op_name: str) -> LegalizeRule:
    """Return TVM's own legalization of an operator.

    It is read when a module is imported, before :func:`relax_grad.install` replaces it.
    Later, a legalization that leaves some calls to TVM would call itself endlessly.
    """
    return Op.get(op_name).get_attr("FLegalize")


def shape_values(shape: relax.Expr) -> list[tirx.PrimExpr]:
    """Return the dimensions of a shape argument, either a shape expression or a variable."""
    return list(shape.ty.values)


def int_list(values: Iterable) -> list[int]:
    """Return an attribute that is an array of integers as a Python list."""
    return [int(value) for value in values]


def is_empty(call: relax.Call) -> bool:
    """Tell whether the result of a call is known to have no elements."""
    shape = call.ty.shape
    return isinstance(shape, relax.ShapeExpr) and topi_util.is_empty(shape.values)


def zeros(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Return the result of a call that has no elements.

    The function takes no argument. TVM turns a function from one empty tensor to another into a
    reshape, and reads the extent 0 in its shape as "as in the data".
    """
    return bb.call_te(
        topi_util.zeros,
        list(call.ty.shape.values),
        dtype_of(call.ty),
        primfunc_name_hint="empty",
    )


def zero_where_empty(
    bb: relax.BlockBuilder, total: relax.Expr, extents: Sequence[tirx.PrimExpr]
) -> relax.Expr:
    """Return a legalized sum of products, with 0 if one of these summed extents is 0.

    The selection is a separate call and fuses with the sum as its consumer. So TVM finds the sum
    in the form that its schedules know.
    """
    return bb.call_te(
        topi_util.fill_where_empty,
        bb.emit(total),
        list(extents),
        primfunc_name_hint="zero_where_empty",
    )
