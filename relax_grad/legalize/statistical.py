"""Legalization of reductions for which TVM's is wrong, and of their backward operators."""

from __future__ import annotations

import math

from tvm import relax, tirx

from ..ir.compat import dtype_of
from ..registry import register_legalize
from ..topi import statistical as topi_statistical
from ..topi import util as topi_util
from ._gpu import bind_threads, keep_apart
from ._util import int_list, shape_values, stock

_STOCK_MEDIAN = stock("relax.median")

#: For each reduction, by its name without ``relax.``: its tensor expression over axes that may be
#: empty, and its value over an empty axis.
_REDUCTIONS = {
    "sum": (topi_statistical.sum, 0),
    "prod": (topi_statistical.prod, 1),
    "mean": (topi_statistical.mean, float("nan")),
    "variance": (topi_statistical.variance, float("nan")),
    "std": (topi_statistical.std, float("nan")),
}


def _legalize_reduction(name: str) -> None:
    reduce, of_nothing = _REDUCTIONS[name]
    op_name = f"relax.{name}"
    of_tvm = stock(op_name)

    @register_legalize(
        op_name,
        corrects=(
            "returns uninitialised memory for an empty symbolic axis; does not compile a mean "
            "over a static empty axis, or over all axes for GPUs"
        ),
    )
    def legalize(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        dtype = dtype_of(call.ty)
        numbers = ("float",) if math.isnan(of_nothing) else ("float", "int")
        if not _may_be_empty(call) or not any(kind in dtype for kind in numbers):
            return scheduled(bb, call, of_tvm(bb, call))
        if topi_util.is_empty(_extents(call)):
            shape = list(call.ty.shape.values)
            return bb.call_te(
                topi_statistical.full, shape, of_nothing, dtype, primfunc_name_hint=name
            )
        result = bb.call_te(
            reduce, call.args[0], _axes(call), bool(call.attrs.keepdims), primfunc_name_hint=name
        )
        return scheduled(bb, call, result, is_sum=False)

    def scheduled(
        bb: relax.BlockBuilder,
        call: relax.Call,
        result: relax.Expr,
        is_sum: bool = op_name == "relax.sum",
    ) -> relax.Expr:
        """Bind the threads of a reduction to a scalar; TVM schedules sums that no expression of the
        function reads, and reductions over some of the axes."""
        is_total = len(_extents(call)) == call.args[0].ty.ndim
        result = bind_threads(bb, result, always=is_total and not is_sum)
        return result if is_total else keep_apart(bb, result)


for _name in _REDUCTIONS:
    _legalize_reduction(_name)


def _legalize_extremum(op_name: str) -> None:
    of_tvm = stock(op_name)

    @register_legalize(
        op_name, corrects="on a GPU, wrong over no axes where another function reads the result"
    )
    def legalize(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        return bind_threads(bb, of_tvm(bb, call), always=False)


for _name in ("relax.max", "relax.min"):
    _legalize_extremum(_name)


@register_legalize(
    "relax.median",
    corrects=(
        "reads out of bounds over several axes, returns the wrong type over no axes, ignores "
        "keepdims without axes, and sorts bfloat16 as another dtype"
    ),
)
def _median(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    (x,) = call.args
    axes, keepdims = _axes(call), bool(call.attrs.keepdims)
    if dtype_of(x.ty) == "bfloat16":
        wide = relax.op.median(relax.op.astype(x, "float32"), call.attrs.axis, keepdims)
        if isinstance(call.ty, relax.TensorType):
            return relax.op.astype(wide, "bfloat16")
        wide = bb.emit(wide)
        value = relax.op.astype(relax.TupleGetItem(wide, 0), "bfloat16")
        return relax.Tuple([value, relax.TupleGetItem(wide, 1)])
    if call.attrs.axis is not None and len(axes) == 0:
        index = bb.call_te(
            topi_util.zeros, list(x.ty.shape.values), "int64", primfunc_name_hint="index"
        )
        return relax.Tuple([x, index])
    one_axis = call.attrs.axis is not None and len(axes) == 1
    if (one_axis or (call.attrs.axis is None and not keepdims)) and not _may_be_empty(call):
        return _STOCK_MEDIAN(bb, call)
    value_type = call.ty.fields[0] if isinstance(call.ty, relax.TupleType) else call.ty
    medians = bb.call_te(
        topi_statistical.median,
        x,
        axes,
        list(value_type.shape.values),
        primfunc_name_hint="median",
    )
    if isinstance(call.ty, relax.TupleType):
        return medians
    return relax.TupleGetItem(bb.emit(medians), 0)


@register_legalize("relax.grad.mean_backward_x")
def _mean_backward_x(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    output_grad, x_shape = call.args
    extents = shape_values(x_shape)
    axis = range(len(extents)) if call.attrs.axis is None else call.attrs.axis
    return bb.call_te(
        topi_statistical.mean_backward_x,
        output_grad,
        extents,
        [int(a) % len(extents) for a in axis],
        bool(call.attrs.keepdims),
        primfunc_name_hint="mean_backward_x",
    )


def _may_be_empty(reduction: relax.Call) -> bool:
    """Tell whether a reduced axis is empty or symbolic."""
    return not all(
        topi_util.is_static(extent) and int(extent) > 0 for extent in _extents(reduction)
    )


def _extents(reduction: relax.Call) -> list[tirx.PrimExpr]:
    """Return the extents of the reduced axes."""
    shape = reduction.args[0].ty.shape.values
    return [shape[axis] for axis in _axes(reduction)]


def _axes(reduction: relax.Call) -> list[int]:
    """Return the non-negative axes of a reduction."""
    ndim = reduction.args[0].ty.ndim
    axis = reduction.attrs.axis
    return list(range(ndim)) if axis is None else [axis % ndim for axis in int_list(axis)]
