"""Legalization of take and gather_elements and of their backward operators."""

from __future__ import annotations

from tvm import relax, tirx

from ..ir.compat import Analyzer, constant_value, dtype_of
from ..ir.module import short_name
from ..op.index import check_take_backward, take_attrs
from ..registry import register_legalize
from ..topi import index as topi_index
from ..topi.util import on_gpu
from ._util import shape_values, stock

_STOCK_TAKE = stock("relax.take")


@register_legalize(
    "relax.take",
    corrects=(
        "reads out of bounds for negative and large indices in mode fast, and for an empty axis "
        "in modes clip and wrap; does not compile mode nan for axis=None or integers"
    ),
)
def _take(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    # TVM's code for CUDA has no NaN of bfloat16, which TVM's function returns.
    has_nan = not (on_gpu() and dtype_of(call.ty) == "bfloat16")
    if has_nan and _stock_take_is_right(call):
        return _STOCK_TAKE(bb, call)
    return _call_take(bb, call, "nan")


@register_legalize("relax.grad.take_jvp")
def _take_jvp(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return _call_take(bb, call, "zero")


@register_legalize(
    "relax.grad.take_backward",
    corrects=(
        "writes out of bounds for a negative axis and for indices outside of it, ignores mode, "
        "and supports indices of rank 1 only"
    ),
)
def _take_backward(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    check_take_backward(call, bb)
    output_grad, x, indices = call.args
    return bb.call_te(
        topi_index.take_backward,
        output_grad,
        indices,
        list(x.ty.shape.values),
        **take_attrs(call),
        primfunc_name_hint="take_backward",
    )


@register_legalize(
    "relax.gather_elements",
    corrects="reads out of bounds for negative and large indices, and refuses empty indices",
)
def _gather_elements(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return _call_gather_elements(bb, call, "nan")


@register_legalize("relax.grad.gather_elements_jvp")
def _gather_elements_jvp(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return _call_gather_elements(bb, call, "zero")


@register_legalize("relax.grad.gather_elements_backward_data")
def _gather_elements_backward_data(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    output_grad, data_shape, indices = call.args
    return bb.call_te(
        topi_index.gather_elements_backward_data,
        output_grad,
        indices,
        shape_values(data_shape),
        axis=int(call.attrs.axis),
        primfunc_name_hint="gather_elements_backward_data",
    )


def _call_take(bb: relax.BlockBuilder, call: relax.Call, fill: str) -> relax.Expr:
    return bb.call_te(
        topi_index.take,
        *call.args,
        **take_attrs(call),
        fill=fill,
        primfunc_name_hint=short_name(call),
    )


def _call_gather_elements(bb: relax.BlockBuilder, call: relax.Call, fill: str) -> relax.Expr:
    return bb.call_te(
        topi_index.gather_elements,
        *call.args,
        axis=int(call.attrs.axis),
        fill=fill,
        primfunc_name_hint=short_name(call),
    )


def _stock_take_is_right(call: relax.Call) -> bool:
    """Tell whether TVM's legalization reads in bounds for every value of the indices."""
    x, indices = call.args
    axis = call.attrs.axis
    # TVM casts unsigned indices to signed ones and ignores overflow.
    if "uint" in str(indices.ty.dtype) or (
        axis is None and not isinstance(indices.ty, relax.TensorType)
    ):
        return False
    extent = x.ty.shape.values[0 if axis is None else int(axis)]
    mode = call.attrs.mode
    if mode == "nan":
        return axis is not None and "float" in str(x.ty.dtype)
    if mode in ("clip", "wrap"):
        return isinstance(extent, tirx.IntImm) and int(extent) > 0
    return provably_inside(indices, extent)


def provably_inside(indices: relax.Expr, extent: tirx.PrimExpr) -> bool:
    """Tell whether all indices are provably in bounds, as constants or symbolic expressions."""
    values = constant_value(indices)
    if values is not None:
        return not values.size or (values.min() >= 0 and _below(int(values.max()), extent))
    if isinstance(indices.ty, relax.TensorType):
        return False
    return _proves(indices >= 0) and _below(indices, extent)


def _below(index: int | tirx.PrimExpr, extent: tirx.PrimExpr) -> bool:
    return _proves(extent > index)


def _proves(condition: tirx.PrimExpr) -> bool:
    return Analyzer().can_prove(condition)
