"""Legalization of the strided slices and of their backward operators.

A slice from the first element on, and its gradient, read the element at the place that they write.
TVM takes them for functions of elements, and fuses them with a convolution or a product before
them. Its rules for GPUs then fail, since the extents differ, so the functions stay apart there.
"""

from __future__ import annotations

import functools

from tvm import relax, te, tirx, topi

from ..registry import register_legalize
from ..topi import index_slice as topi_slice
from ._gpu import keep_apart
from ._util import int_list, shape_values, stock

_STOCK_STRIDED_SLICE = stock("relax.strided_slice")


@register_legalize(
    "relax.strided_slice",
    corrects=(
        "does not compile for a negative axis of a symbolic shape; for a symbolic shape, TVM 0.26 "
        "also reads out of bounds at a negative begin; on a GPU, does not compile after a "
        "convolution"
    ),
)
def _strided_slice(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return keep_apart(bb, _sliced(bb, call))


def _sliced(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    x, axes, begin, end, *strides = call.args
    if not all(isinstance(arg, relax.Tuple) for arg in call.args[1:]):
        return _STOCK_STRIDED_SLICE(bb, call)
    ndim = x.ty.ndim
    axes = [int(axis) % ndim for axis in axes.fields]
    static = all(
        isinstance(value, tirx.IntImm)
        for value in (*x.ty.shape.values, *(v for arg in call.args[2:] for v in arg.fields))
    )
    if static or call.attrs.assume_inbound or _stock_clips_begin():
        plain = relax.Tuple([tirx.IntImm("int64", axis) for axis in axes])
        return _STOCK_STRIDED_SLICE(
            bb, bb.normalize(relax.Call(call.op, [x, plain, begin, end, *strides], call.attrs))
        )
    return bb.call_te(
        topi_slice.strided_slice,
        x,
        list(call.ty.shape.values),
        axes,
        list(begin.fields),
        list(strides[0].fields) if strides else [1] * len(axes),
        primfunc_name_hint="strided_slice",
    )


@functools.cache
def _stock_clips_begin() -> bool:
    """Tell whether topi.strided_slice counts a negative begin from a symbolic end, as from 0.27
    on."""
    extent = tirx.Var("extent", "int64")
    data = te.placeholder((extent,), name="data")
    sliced = topi.strided_slice(
        data, [tirx.IntImm("int64", -1)], [extent], [1], [0], assume_inbound=False
    )
    return any(var.same_as(extent) for var in tirx.analysis.undefined_vars(sliced.op.body[0]))


@register_legalize("relax.grad.strided_slice_backward_data")
def _strided_slice_backward_data(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    output_grad, data_shape, axes, begin, _, strides = call.args
    gradient = bb.call_te(
        topi_slice.strided_slice_backward_data,
        output_grad,
        shape_values(data_shape),
        int_list(axes.fields),
        list(begin.fields),
        list(strides.fields),
        bool(call.attrs.assume_inbound),
        primfunc_name_hint="strided_slice_backward_data",
    )
    return keep_apart(bb, gradient)


@register_legalize(
    "relax.dynamic_strided_slice",
    corrects="reads out of bounds for a negative begin, divides by a stride of 0, and returns "
    "negative extents where end lies before begin",
)
def _dynamic_strided_slice(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    x, begin, end, strides = call.args
    shape = bb.emit_te(topi_slice.dynamic_strided_slice_shape, x, begin, end, strides)
    extents = [tirx.Var(f"s{axis}", "int64") for axis in range(x.ty.ndim)]
    bb.match_cast(bb.emit(relax.op.tensor_to_shape(shape)), relax.ShapeType(extents))
    sliced = bb.call_te(
        topi_slice.dynamic_strided_slice,
        x,
        begin,
        strides,
        output_shape=extents,
        primfunc_name_hint="dynamic_strided_slice",
    )
    return keep_apart(bb, sliced)


@register_legalize("relax.grad.dynamic_strided_slice_backward_data")
def _dynamic_strided_slice_backward_data(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    output_grad, data_shape, begin, _, strides = call.args
    if not isinstance(output_grad.ty.shape, relax.ShapeExpr):
        rank = len(shape_values(data_shape))
        extents = [tirx.Var(f"s{axis}", "int64") for axis in range(rank)]
        output_grad = bb.match_cast(output_grad, relax.TensorType(extents, output_grad.ty.dtype))
    gradient = bb.call_te(
        topi_slice.dynamic_strided_slice_backward_data,
        output_grad,
        shape_values(data_shape),
        begin,
        strides,
        primfunc_name_hint="dynamic_strided_slice_backward_data",
    )
    return keep_apart(bb, gradient)
