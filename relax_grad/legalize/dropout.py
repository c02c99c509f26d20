"""Legalization of dropout: by the counter-based generator, and for releases of TVM that have
none."""

from __future__ import annotations

from tvm import relax, topi
from tvm.relax import op

from ..op.attention_dropout import is_of_part, rate_of
from ..registry import register_legalize
from ..topi import dropout as topi_dropout
from ..topi.philox import Form, philox, philox_of_parts
from ._util import is_empty, stock, zeros

_STOCK_DROPOUT = stock("relax.nn.dropout")


@register_legalize("relax.grad.seeded_dropout")
def _seeded_dropout(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    data, seed, stream, _ = call.args
    if is_empty(call):
        return zeros(bb, call)
    form = Form.kept(rate_of(call))
    if is_of_part(call):
        return _of_part(bb, data, seed, stream, form)
    rows = topi_dropout.rows_of(data.ty.shape.values, form.per_row)
    function = bb.add_func(philox(rows if isinstance(rows, int) else None, form), "philox")
    extents = [rows, form.per_block, form.per_row // form.per_block]
    kind = relax.TensorType(extents, form.dtype)
    kept = bb.emit(op.call_tir(function, relax.Tuple([seed, stream]), kind))
    return bb.call_te(
        topi_dropout.dropped, data, kept, form.scale, primfunc_name_hint="seeded_dropout"
    )


def _of_part(
    bb: relax.BlockBuilder, data: relax.Expr, seed: relax.Expr, stream: relax.Expr, form: Form
) -> relax.Expr:
    """Return the dropout of a part of a tensor with more heads."""
    shape = list(data.ty.shape.values)
    first = bb.emit_te(topi_dropout.first_rows, stream, shape, form.per_row)
    function = bb.add_func(philox_of_parts(form), "philox_of_parts")
    rows = topi_dropout.rows_of_part(shape, form.per_row)
    extents = [shape[0], rows, form.per_block, form.per_row // form.per_block]
    kind = relax.TensorType(extents, form.dtype)
    kept = bb.emit(op.call_tir(function, relax.Tuple([seed, stream, first]), kind))
    return bb.call_te(
        topi_dropout.dropped_part,
        data,
        kept,
        stream,
        form.scale,
        primfunc_name_hint="seeded_dropout",
    )


@register_legalize(
    "relax.nn.dropout", corrects="TVM 0.26 has no legalization, so the operator does not compile"
)
def _dropout(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Return the data and a mask of ones, as later releases do."""
    result = _STOCK_DROPOUT(bb, call)
    if not result.same_as(call):
        return result
    return bb.call_te(
        lambda x: [topi.identity(x), topi.full_like(x, 1.0)],
        call.args[0],
        primfunc_name_hint="dropout",
    )
