"""Dedicated backward operators: declaration, type inference and builder."""

from . import (
    attention,
    ccl,
    conv,
    image,
    index,
    index_write,
    linear_algebra,
    loss,
    manipulate,
    norm,
    pad,
    pool,
    scan,
    sorting,
    statistical,
    vision,
)
