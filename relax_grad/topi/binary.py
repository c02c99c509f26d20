"""Tensor expressions of element-wise functions of two or more arguments."""

from __future__ import annotations

import math

from tvm import te, tirx, topi

from ..ir.dtypes import accumulation_dtype
from ..ir.floats import guarded
from .util import Shape, broadcast_index


def log_add_exp(x1: te.Tensor, x2: te.Tensor, out_shape: Shape) -> te.Tensor:
    """Compute ``log(exp(x1) + exp(x2))`` as ``max(x1, x2) + log(1 + exp(-abs(x1 - x2)))``.

    Unlike ``topi.log_add_exp`` it does not overflow where the result does not.

    Parameters
    ----------
    x1, x2 : te.Tensor
        The arguments, of one floating-point dtype.
    out_shape : Sequence[int or PrimExpr]
        The shape to which the arguments are broadcast.

    Returns
    -------
    result : te.Tensor
        A tensor of shape ``out_shape`` and the dtype of the arguments.
    """
    dtype = accumulation_dtype(x1.dtype)

    def element(*index: tirx.PrimExpr) -> tirx.PrimExpr:
        a, b = (x(*broadcast_index(x.shape, index)).astype(dtype) for x in (x1, x2))
        rest = tirx.log(tirx.exp(-tirx.abs(a - b)) + 1)
        # The difference of two equal infinities is NaN. Half of each argument has the derivative
        # 1/2 by each.
        half = tirx.const(0.5, dtype)
        total = tirx.Select(
            a == b,
            (a * half + b * half) + tirx.const(math.log(2), dtype),
            tirx.Select(a > b, a, b) + rest,
        )
        return total.astype(x1.dtype)

    return te.compute(out_shape, element, name="log_add_exp", tag=topi.tag.BROADCAST)


def with_zero(x: te.Tensor, zero: float, is_divisor: bool) -> te.Tensor:
    """Compute ``x * 0``, which is NaN where x is NaN or infinite, or ``0 / x``, which is NaN where
    x is NaN or 0.

    TVM takes a product with the constant 0, and a quotient of it, for 0.

    Parameters
    ----------
    x : te.Tensor
        The argument, of dtype float32 or float64.
    zero : float
        0 or -0.
    is_divisor : bool
        Whether to divide by the argument.

    Returns
    -------
    result : te.Tensor
        A tensor of the shape and dtype of the argument.
    """
    constant = guarded(tirx.const(zero, x.dtype))

    def element(*index: tirx.PrimExpr) -> tirx.PrimExpr:
        return tirx.Div(constant, x(*index)) if is_divisor else tirx.Mul(x(*index), constant)

    return te.compute(x.shape, element, name="with_zero", tag=topi.tag.ELEMWISE)


def ewise_fma(x1: te.Tensor, x2: te.Tensor, x3: te.Tensor) -> te.Tensor:
    """Compute ``x1 * x2 + x3``; half precision is computed in float32, so that it is rounded once.

    Parameters
    ----------
    x1, x2, x3 : te.Tensor
        The arguments, of one shape and dtype.

    Returns
    -------
    result : te.Tensor
        A tensor of the shape and dtype of the arguments.
    """
    dtype = accumulation_dtype(x1.dtype)

    def element(*index: tirx.PrimExpr) -> tirx.PrimExpr:
        a, b, c = (x(*index).astype(dtype) for x in (x1, x2, x3))
        return (a * b + c).astype(x1.dtype)

    return te.compute(x1.shape, element, name="ewise_fma", tag=topi.tag.ELEMWISE)
