"""Kernels of softmax, of its logarithm and of its gradient."""

from __future__ import annotations

from math import prod

from ..kernel import softmax as kernels
from ._registry import Kernel, Site, kernel_for

_MAKE = {
    "relax.nn.softmax": kernels.softmax,
    "relax.nn.log_softmax": kernels.log_softmax,
    "relax.grad.softmax_backward": kernels.softmax_backward,
}


@kernel_for(*_MAKE)
def softmax(site: Site) -> Kernel | None:
    """Return the kernel of softmax along the last axis."""
    shapes = [site.shape(argument) for argument in site.call.args]
    if None in shapes or not shapes[0]:
        return None
    shape = shapes[0]
    if int(site.call.attrs.axis) % len(shape) != len(shape) - 1:
        return None
    make = _MAKE[site.call.op.name]
    return Kernel(make(prod(shape[:-1]), shape[-1], shape, site.cpu), site.call.args)
