"""Legalization of gather_nd and index_tensor and of their backward operators."""

from __future__ import annotations

from tvm import relax

from ..ir.compat import constant_value
from ..ir.module import short_name, tuple_fields
from ..registry import register_legalize
from ..topi import index_nd as topi_index_nd
from ._util import shape_values, stock
from .index import provably_inside

_STOCK_GATHER_ND = stock("relax.gather_nd")
_STOCK_INDEX_TENSOR = stock("relax.index_tensor")


@register_legalize(
    "relax.gather_nd", corrects="reads out of bounds for negative and for large indices"
)
def _gather_nd(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    data, indices = call.args
    batch_dims = int(call.attrs.batch_dims)
    points = constant_value(indices)
    if batch_dims == 0 and points is not None and points.size:
        extents = data.ty.shape.values[: points.shape[-1]]
        if all(
            provably_inside(relax.const(points[..., i]), extent) for i, extent in enumerate(extents)
        ):
            return _STOCK_GATHER_ND(bb, call)
    return _call_gather_nd(bb, call, "nan")


@register_legalize("relax.grad.gather_nd_jvp")
def _gather_nd_jvp(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return _call_gather_nd(bb, call, "zero")


@register_legalize("relax.grad.gather_nd_backward_data")
def _gather_nd_backward_data(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    output_grad, data_shape, indices = call.args
    return bb.call_te(
        topi_index_nd.gather_nd_backward_data,
        output_grad,
        indices,
        shape_values(data_shape),
        int(call.attrs.batch_dims),
        primfunc_name_hint="gather_nd_backward_data",
    )


@register_legalize(
    "relax.index_tensor", corrects="reads out of bounds for negative and for large indices"
)
def _index_tensor(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    data, indices = call.args
    if isinstance(indices, relax.Tuple) and all(
        constant_value(index) is not None and provably_inside(index, extent)
        for index, extent in zip(indices.fields, data.ty.shape.values, strict=False)
    ):
        return _STOCK_INDEX_TENSOR(bb, call)
    return _call_index_tensor(bb, call, "nan")


@register_legalize("relax.grad.index_tensor_jvp")
def _index_tensor_jvp(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return _call_index_tensor(bb, call, "zero")


@register_legalize("relax.grad.index_tensor_backward_data")
def _index_tensor_backward_data(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    output_grad, data_shape, indices = call.args
    return bb.call_te(
        topi_index_nd.index_tensor_backward_data,
        output_grad,
        tuple_fields(indices),
        shape_values(data_shape),
        primfunc_name_hint="index_tensor_backward_data",
    )


def _call_gather_nd(bb: relax.BlockBuilder, call: relax.Call, fill: str) -> relax.Expr:
    return bb.call_te(
        topi_index_nd.gather_nd,
        *call.args,
        int(call.attrs.batch_dims),
        fill,
        primfunc_name_hint=short_name(call),
    )


def _call_index_tensor(bb: relax.BlockBuilder, call: relax.Call, fill: str) -> relax.Expr:
    return bb.call_te(
        topi_index_nd.index_tensor,
        call.args[0],
        tuple_fields(call.args[1]),
        fill,
        primfunc_name_hint=short_name(call),
    )
