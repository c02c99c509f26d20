"""From operator to tensor expression (FLegalize)."""

from . import (
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
    sorting,
    statistical,
    vision,
)
