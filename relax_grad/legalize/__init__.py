"""From operator to tensor expression (FLegalize)."""

from . import (
    attention,
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
