"""Tensor expressions of the backward operators: pure te, static or symbolic, without a schedule."""

from .conv import conv_backward_data, conv_backward_weight

__all__ = ["conv_backward_data", "conv_backward_weight"]
