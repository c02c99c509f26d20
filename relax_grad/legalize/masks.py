"""Legalization of TVM's functions from numbers to truth values and back, which must stay apart from
products on a GPU."""

from __future__ import annotations

from tvm import relax

from ..ir.compat import dtype_of
from ..registry import register_legalize
from ._gpu import keep_masks_apart
from ._util import stock

_COMPARISONS = ("equal", "greater", "greater_equal", "less", "less_equal", "not_equal")

#: The operators that take numbers and return truth values, or the other way round.
_MASKED = ("astype", "isfinite", "isinf", "isnan", "where", *_COMPARISONS)

_EQUALITIES = ("relax.equal", "relax.not_equal")


def _register(op_name: str) -> None:
    of_tvm = stock(op_name)

    @register_legalize(
        op_name,
        corrects="after a product on a GPU, reads and writes vectors of truth values as 16-bit "
        "integers; the equality of computed truth values does not compile on CPUs",
    )
    def legalize(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        if op_name in _EQUALITIES and dtype_of(call.args[0].ty) == "bool":
            differ = bb.normalize(relax.op.logical_xor(*call.args))
            return differ if op_name == "relax.not_equal" else relax.op.logical_not(differ)
        return keep_masks_apart(bb, call, of_tvm(bb, call))


for _name in _MASKED:
    _register(f"relax.{_name}")
