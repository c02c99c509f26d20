"""Kernels of products with weights of 8 and 4 bits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from tvm import relax

from ...ir.compat import dtype_of
from ...op.quantized import NUMBERS
from ..kernel.matmul.quantized import Quantized, quantized_matmul
from .registry import CallSite, Kernel, all_known, decompose, kernel_for

_FORWARD = "relax.grad.quantized_matmul"
_BACKWARD = "relax.grad.quantized_matmul_backward_data"


@kernel_for(_FORWARD, _BACKWARD, takes_uncast=False)
def quantized(site: CallSite) -> Kernel | None:
    """Return the kernel of a product with a weight whose groups consist of whole vectors."""
    is_backward = site.call.op.name == _BACKWARD
    data, *weight = (
        operand for operand in site.call.args if not isinstance(operand.ty, relax.ShapeType)
    )
    shapes, of = site.shapes(data, site.call), _weight(site, weight)
    if shapes is None or of is None:
        return None
    return Kernel(
        partial(quantized_matmul, of, site.cpu, *shapes, backward=is_backward), [data, *weight]
    )


# Products of several floating-point dtypes consist of casts, and of the operator in float32.
decompose(_FORWARD, _BACKWARD)


def _weight(site: CallSite, operands: Sequence[relax.Expr]) -> Quantized | None:
    """Return the layout of a weight; None if no kernel supports it."""
    weight, scale, *zero_point = operands
    dtype = dtype_of(weight.ty)
    shapes = all_known(
        [
            site.shape(weight, dtype),
            site.shape(scale),
            *(site.shape(tensor, dtype_of(tensor.ty)) for tensor in zero_point),
        ]
    )
    if shapes is None or not all(isinstance(extent, int) for extent in shapes[0]):
        return None
    outputs, groups, width = shapes[0]
    size, bits = width * NUMBERS[dtype], 8 // NUMBERS[dtype]
    zeros = dtype_of(zero_point[0].ty) if zero_point else ""
    if zero_point and site.is_of(zero_point[0].ty):
        zeros = "float32"
    if size % site.cpu.lanes or zeros not in ("", dtype, "float32"):
        return None
    return Quantized(outputs, groups, size, bits, zeros)
