"""From operator to tensor expression (FLegalize)."""

from . import conv, index, loss, manipulate, norm, pool, statistical
