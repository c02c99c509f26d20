"""Dedicated backward operators: declaration, type inference and builder."""

from . import (
    activation,
    attention,
    ccl,
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
    vision,
)
