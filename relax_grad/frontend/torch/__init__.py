"""PyTorch models as Relax modules to train. The import of this package needs PyTorch."""

from __future__ import annotations

from ..._packages import load, warn_of_newer_torch

# The line that imports this package gets the warning: the frames of imports do not count.
warn_of_newer_torch(load("torch", "relax_grad.frontend.torch").__version__, stacklevel=2)

from ...errors import UnsupportedOperatorError  # noqa: E402
from ._imported import Imported  # noqa: E402
from .model import from_exported_program, from_module  # noqa: E402
from .run.wrap import wrap  # noqa: E402

__all__ = ["Imported", "UnsupportedOperatorError", "from_exported_program", "from_module", "wrap"]
