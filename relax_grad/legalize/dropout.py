"""Legalization of dropout, where TVM has none."""

from __future__ import annotations

from tvm import relax, topi
from tvm.relax.transform.legalize_ops.nn import _nn_dropout as tvm_dropout

from ..registry import register_legalize


@register_legalize("relax.nn.dropout", corrects="0.26 leaves it as it is, and it does not compile")
def _dropout(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """The identity, with a mask of ones, as in later releases."""
    result = tvm_dropout(bb, call)
    if not result.same_as(call):
        return result
    return bb.call_te(
        lambda x: [topi.identity(x), topi.full_like(x, 1.0)],
        call.args[0],
        primfunc_name_hint="dropout",
    )
