"""The choice of kernels for calls of operators: one module per family of operators."""

from . import (
    attention,
    concat,
    conv,
    index,
    linear_algebra,
    norm,
    norm_residuals,
    pool,
    quantized,
    recurrent,
    reduce,
    softmax,
)
from .registry import CallSite, Kernel, kernel_for, operators_with_kernels

__all__ = ["CallSite", "Kernel", "kernel_for", "operators_with_kernels"]
