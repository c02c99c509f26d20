"""Legalization of products with weights of 8 and 4 bits."""

from __future__ import annotations

from collections.abc import Callable

from tvm import relax, te
from tvm.relax import op

from ..ir.compat import dtype_of
from ..ir.dtypes import accumulation_dtype
from ..ir.module import short_name
from ..registry import register_legalize
from ..topi import quantized as topi_quantized
from ._gpu import bind_threads
from ._util import shape_values


@register_legalize("relax.grad.quantized_matmul")
def _quantized_matmul(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    data, weight, scale, *zero_point = call.args
    return _product(
        bb, call, topi_quantized.quantized_matmul, data, weight, scale=scale, zero_point=zero_point
    )


@register_legalize("relax.grad.quantized_matmul_backward_data")
def _quantized_matmul_backward_data(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    output_grad, data_shape, weight, scale, *zero_point = call.args
    shape = shape_values(data_shape)

    def backward(gradient: te.Tensor, *others: te.Tensor) -> te.Tensor:
        return topi_quantized.quantized_matmul_backward_data(gradient, shape, *others)

    return _product(bb, call, backward, output_grad, weight, scale=scale, zero_point=zero_point)


def _product(
    bb: relax.BlockBuilder,
    call: relax.Call,
    function: Callable,
    data: relax.Expr,
    weight: relax.Expr,
    scale: relax.Expr,
    zero_point: list[relax.Expr],
) -> relax.Expr:
    """Return the product; floating-point numbers of other dtypes are cast to the
    accumulator's dtype first."""
    dtype = dtype_of(data.ty)
    wide = accumulation_dtype(dtype)
    floats = [operand for operand in (data, scale, *zero_point) if "float" in dtype_of(operand.ty)]
    if all(dtype_of(operand.ty) == wide for operand in floats):
        zeros = zero_point[0] if zero_point else None
        product = bb.call_te(
            function, data, weight, scale, zeros, primfunc_name_hint=short_name(call)
        )
        return bind_threads(bb, product, always=False)
    arguments = [
        bb.emit(op.astype(argument, wide))
        if any(argument.same_as(operand) for operand in floats) and dtype_of(argument.ty) != wide
        else argument
        for argument in call.args
    ]
    product = relax.Call(call.op, arguments)
    return product if wide == dtype else op.astype(bb.emit(product), dtype)
