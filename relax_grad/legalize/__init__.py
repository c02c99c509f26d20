"""From operator to tensor expression (FLegalize)."""

from . import (
    attention,
    conv,
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
    sorting,
    statistical,
    vision,
)
