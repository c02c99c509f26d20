"""ONNX models as Relax modules to train. The import of a model needs the package ``onnx``."""

from ...errors import UnsupportedOperatorError
from .model import Imported, from_model

__all__ = ["Imported", "UnsupportedOperatorError", "from_model"]
