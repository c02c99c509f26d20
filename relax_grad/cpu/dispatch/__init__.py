"""The choice of kernels for calls of operators: one module per family of operators."""

from . import concat, conv, index, linear_algebra, norm, norm_saving, pool, reduce, softmax
from ._declaration import declaration
from ._registry import Kernel, Site, find_kernel, kernel_for, operators_with_kernels
from ._saving import Calls, Saving, Use, find_saving

__all__ = [
    "Calls",
    "Kernel",
    "Saving",
    "Site",
    "Use",
    "declaration",
    "find_kernel",
    "find_saving",
    "kernel_for",
    "operators_with_kernels",
]
