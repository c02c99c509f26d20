"""Libraries of operators: a pass that lets PyTorch's compute the calls that it has functions for,
and patterns of backward operators for backends that have primitives for them.

The import registers nothing. A backend registers its patterns with
:func:`register_backward_patterns`.
"""

from .call import BackwardCall
from .dispatch import DispatchLibrary
from .patterns import (
    CONV_BACKWARD,
    POOL_BACKWARD,
    backward_patterns,
    make_backward_pattern,
    register_backward_patterns,
)

__all__ = [
    "CONV_BACKWARD",
    "POOL_BACKWARD",
    "BackwardCall",
    "DispatchLibrary",
    "backward_patterns",
    "make_backward_pattern",
    "register_backward_patterns",
]
