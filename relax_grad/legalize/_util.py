"""What the legalizations share."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax, tirx
from tvm.ir import Op

from ..ir.compat import dtype_of
from ..registry import LegalizeRule
from ..topi import util as topi_util

#: What TVM's legalization of an operator that moves elements does wrong if it does not use zeros.
EMPTY = "an empty tensor does not compile: a later pass takes the extent 0 for 'as in the data'"


def stock(op_name: str) -> LegalizeRule:
    """Return TVM's own legalization of an operator.

    It is read when a module is imported, before :func:`relax_grad.install` puts that of relax_grad in its place:
    later, a legalization that leaves some calls to TVM would call itself without end.
    """
    return Op.get(op_name).get_attr("FLegalize")


def shape_values(shape: relax.Expr) -> list[tirx.PrimExpr]:
    """Return the dimensions of a shape argument, whether it is written out or a variable."""
    return list(shape.ty.values)


def int_list(values) -> list[int]:
    """Return an attribute that is an array of integers as a list of Python's."""
    return [int(value) for value in values]


def is_empty(call: relax.Call) -> bool:
    """Tell whether the result of a call is known to have no elements."""
    shape = call.ty.shape
    return isinstance(shape, relax.ShapeExpr) and topi_util.is_empty(shape.values)


def zeros(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Return the result of a call that has no elements.

    It takes no argument: TVM makes a reshape of a function from an empty tensor to another, and takes the
    extent 0 in it for "as in the data".
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
    """Return a legalized sum of products, and 0 where one of these extents of what is summed is 0.

    It is a call of its own, which is fused with the sum as what follows that is, so that TVM finds the sum in
    the form that its schedules know.
    """
    return bb.call_te(
        topi_util.fill_where_empty,
        bb.emit(total),
        list(extents),
        primfunc_name_hint="zero_where_empty",
    )
