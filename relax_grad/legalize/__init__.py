"""From operator to tensor expression (FLegalize)."""

from . import (
    activation,
    attention,
    conv,
    image,
    index,
    index_write,
    linear_algebra,
    loss,
    manipulate,
    manipulate_join,
    manipulate_order,
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
