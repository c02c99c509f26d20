"""From operator to tensor expression (FLegalize)."""

from . import (
    activation,
    attention,
    binary,
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
    qdq,
    scan,
    sorting,
    statistical,
    unary,
    vision,
)
