"""Legalization of the operators that write at indices and of their backward operators."""

from __future__ import annotations

from collections.abc import Callable

from tvm import relax

from ..ir.module import tuple_fields
from ..op.index_write import REDUCTIONS, index_tuple, listed_shape
from ..registry import register_legalize
from ..topi import index_write as topi_write
from ._util import shape_values, stock

_STOCK_SCATTER_ELEMENTS = stock("relax.scatter_elements")
_STOCK_SCATTER_ND = stock("relax.scatter_nd")


@register_legalize(
    "relax.scatter_elements",
    corrects=(
        "writes out of bounds for indices outside the axis, treats an index tensor smaller than "
        "the data as one of the data's shape, and accumulates half precision in half precision"
    ),
)
def _scatter_elements(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    if _is_left_to_tvm(call):
        return _STOCK_SCATTER_ELEMENTS(bb, call)
    return bb.call_te(
        topi_write.scatter_elements,
        *call.args,
        int(call.attrs.axis),
        call.attrs.reduction,
        primfunc_name_hint="scatter_elements",
    )


@register_legalize(
    "relax.scatter_nd",
    corrects="writes out of bounds for negative and for large indices, and accumulates half "
    "precision in half precision",
)
def _scatter_nd(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    if _is_left_to_tvm(call):
        return _STOCK_SCATTER_ND(bb, call)
    return bb.call_te(
        topi_write.scatter_nd, *call.args, call.attrs.reduction, primfunc_name_hint="scatter_nd"
    )


@register_legalize(
    "relax.index_put",
    corrects="writes out of bounds for indices outside the data, reads out of bounds for values "
    "that are broadcast, writes equal indices from several threads at once, and "
    "refuses symbolic indices",
)
def _index_put(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    data, indices, values = call.args
    listed = listed_shape(bb, data, indices, values)
    return bb.call_te(
        topi_write.index_put,
        data,
        tuple_fields(index_tuple(indices)),
        values if listed is None else bb.emit(relax.op.reshape(values, listed)),
        bool(call.attrs.accumulate),
        primfunc_name_hint="index_put",
    )


@register_legalize(
    "relax.slice_scatter",
    corrects=(
        "reads out of bounds past the end of src, writes to the wrong elements if the slice is "
        "empty or begins before the axis, and refuses symbolic extents"
    ),
)
def _slice_scatter(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    data, src, start, _, step = call.args
    return bb.call_te(
        topi_write.slice_scatter,
        data,
        src,
        start,
        step,
        int(call.attrs.axis),
        primfunc_name_hint="slice_scatter",
    )


@register_legalize("relax.grad.scatter_elements_backward_updates")
def _scatter_elements_backward_updates(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return bb.call_te(
        topi_write.scatter_elements_backward_updates,
        *call.args,
        int(call.attrs.axis),
        call.attrs.reduction,
        primfunc_name_hint="scatter_elements_backward_updates",
    )


@register_legalize("relax.grad.scatter_nd_backward_updates")
def _scatter_nd_backward_updates(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return bb.call_te(
        topi_write.scatter_nd_backward_updates,
        *call.args,
        primfunc_name_hint="scatter_nd_backward_updates",
    )


@register_legalize("relax.grad.index_put_backward_values")
def _index_put_backward_values(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    output_grad, indices = call.args
    return bb.call_te(
        topi_write.index_put_backward_values,
        output_grad,
        tuple_fields(indices),
        primfunc_name_hint="index_put_backward_values",
    )


@register_legalize("relax.grad.slice_scatter_backward_src")
def _slice_scatter_backward_src(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    output_grad, src_shape, start, _, step = call.args
    return bb.call_te(
        topi_write.slice_scatter_backward_src,
        output_grad,
        shape_values(src_shape),
        start,
        step,
        int(call.attrs.axis),
        primfunc_name_hint="slice_scatter_backward_src",
    )


def _register_scan(op_name: str, function: Callable, has_axis: bool, is_reverse: bool) -> None:
    def legalize(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        start, indices, factors, *terms = call.args
        axis = [int(call.attrs.axis)] if has_axis else []
        term = terms[0] if terms else None
        arguments = (start, indices, factors, term, *axis, is_reverse)
        return bb.call_te(function, *arguments, primfunc_name_hint=op_name)

    register_legalize(f"relax.grad.{op_name}")(legalize)


_register_scan("scatter_elements_scan", topi_write.scatter_elements_scan, True, False)
_register_scan("scatter_elements_scan_reverse", topi_write.scatter_elements_scan, True, True)
_register_scan("scatter_nd_scan", topi_write.scatter_nd_scan, False, False)
_register_scan("scatter_nd_scan_reverse", topi_write.scatter_nd_scan, False, True)


def _is_left_to_tvm(call: relax.Call) -> bool:
    """Tell whether TVM rejects the reduction."""
    return call.attrs.reduction not in REDUCTIONS[call.op.name]
