"""Backward operators, and what steers differentiation: declaration, type inference and builder."""

from . import (
    attention,
    ccl,
    control,
    conv,
    image,
    index,
    index_nd,
    index_write,
    linear_algebra,
    loss,
    manipulate,
    manipulate_join,
    manipulate_order,
    norm,
    pad,
    pool,
    scan,
    statistical,
    stock_layout,
    vision,
)
from .control import checkpoint, stop_gradient
