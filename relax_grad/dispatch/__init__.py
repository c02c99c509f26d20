"""Which calls of operators run as kernels: one module per family of operators."""

from . import conv, index, linear_algebra, norm, pool, reduce, softmax
from ._registry import Kernel, Site, find_kernel, kernel_for, operators_with_kernels

__all__ = ["Kernel", "Site", "find_kernel", "kernel_for", "operators_with_kernels"]
