"""Models of other frameworks as modules to train, constants as parameters, and random numbers.

:mod:`relax_grad.frontend.onnx` needs the package ``onnx``, :mod:`relax_grad.frontend.torch` needs
PyTorch; both are imported separately.
"""

from . import random
from .constants import lift_constants

__all__ = ["lift_constants", "random"]
