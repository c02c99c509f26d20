"""Gradient rules, one module per family, named as in ``tvm.relax.op``."""

from . import (
    base,
    binary,
    ccl,
    create,
    datatype,
    grad,
    image,
    index,
    linear_algebra,
    manipulate,
    nn,
    nondifferentiable,
    qdq,
    search,
    sorting,
    statistical,
    unary,
    vision,
)
