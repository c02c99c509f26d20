"""From operator to tensor expression (FLegalize)."""

from . import (
    activation,
    attention,
    conv,
    dropout,
    image,
    index,
    index_nd,
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
