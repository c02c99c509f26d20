"""Gradients of the backward operators themselves, for second and higher order.

A backward operator is linear in its output gradient. Its gradient with respect to that argument is
the forward operator's derivative along a direction. If the forward operator is linear, this
derivative is the forward operator itself.
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
    quantized,
    recurrent,
    scan,
    statistical,
    vision,
)
