"""PyTorch models as Relax modules to train. The import of this package needs PyTorch."""

from __future__ import annotations

import importlib.util

#: The version that the package is tested with; setup.py has it as well.
TORCH_REQUIREMENT = "torch==2.13.0"

if importlib.util.find_spec("torch") is None:
    raise ImportError(
        "relax_grad.frontend.torch needs the package torch, which the extra torch of relax_grad "
        f"brings; install it: pip install '{TORCH_REQUIREMENT}'"
    )

from ...errors import UnsupportedOperatorError  # noqa: E402
from ._imported import Imported  # noqa: E402
from .model import from_exported_program, from_module  # noqa: E402
from .run.wrap import wrap  # noqa: E402

__all__ = ["Imported", "UnsupportedOperatorError", "from_exported_program", "from_module", "wrap"]
