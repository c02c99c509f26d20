"""Tensor expressions of the backward operators: pure te, for any target, static or symbolic."""

from .conv import conv_backward_data, conv_backward_weight

__all__ = ["conv_backward_data", "conv_backward_weight"]
