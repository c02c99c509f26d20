"""Backward operators for backends that have primitives of their own for them.

Nothing is registered by the import: :func:`register_backward_patterns` does it, for the backend that calls
it.
"""

from .call import BackwardCall
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
    "backward_patterns",
    "make_backward_pattern",
    "register_backward_patterns",
]
