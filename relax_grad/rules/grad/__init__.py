"""Gradients of the backward operators themselves, which give second and higher order.

A backward operator is linear in its output gradient. Its own gradient with respect to that is the
forward operator's derivative along a direction; where the forward operator is linear, that is the
forward operator.
"""

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
    norm,
    pad,
    pool,
    scan,
    statistical,
    vision,
)
