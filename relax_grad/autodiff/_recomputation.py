"""The values that a backward pass computes again rather than reads from the forward pass.

The tables are of operators of TVM. They say how an operator uses memory, which its gradient does
not depend on, so that a wrong entry costs time or memory, and no result.
"""

from __future__ import annotations

import math

import tvm
from tvm import relax
from tvm.tirx import IntImm

from ..ir.compat import dtype_of

#: Operators that return their operand in another shape, which takes no time.
VIEWS = {f"relax.{name}" for name in ("expand_dims", "flatten", "reshape", "squeeze")}

#: Operators without tensor operands, which fill a tensor.
FILLED = {f"relax.{name}" for name in ("arange", "full", "ones", "zeros")}

#: Element-wise operators. If only the backward pass needs the results, it fuses them with their
#: consumers.
ELEMENTWISE = {
    f"relax.{name}"
    for name in (
        *("abs", "acos", "acosh", "add", "asin", "asinh", "astype", "atan", "atanh"),
        *("bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "ceil", "clip", "cos"),
        *("cosh", "divide", "equal", "erf", "exp", "floor", "floor_divide", "full_like"),
        *("greater", "greater_equal", "isfinite", "isinf", "isnan", "less", "less_equal"),
        *("log", "logical_and", "logical_not", "logical_or", "logical_xor", "maximum"),
        *("minimum", "mod", "multiply", "negative", "not_equal", "ones_like", "power", "round"),
        *("rsqrt", "sigmoid", "sign", "sin", "sinh", "sqrt", "square", "subtract", "tan"),
        *("tanh", "trunc", "where", "zeros_like", "nn.gelu", "nn.leakyrelu", "nn.relu"),
        "nn.silu",
    )
}

#: The extent that stands for a symbolic one in comparisons of sizes.
_TYPICAL_EXTENT = 64


def size_of(variable: relax.Var) -> float:
    """Return the number of bytes of a tensor, with a typical number for symbolic extents."""
    shape = variable.ty.shape if isinstance(variable.ty, relax.TensorType) else None
    if not isinstance(shape, relax.ShapeExpr):
        return math.inf
    extents = [int(n) if isinstance(n, IntImm) else _TYPICAL_EXTENT for n in shape.values]
    width = tvm.DataType(dtype_of(variable.ty)).bits
    return math.prod(extents) * max(width, 8) / 8
