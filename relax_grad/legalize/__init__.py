"""From operator to tensor expression (FLegalize)."""

from . import (
    attention,
    conv,
    dropout,
    image,
    index,
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
