"""An extension of the automatic differentiation of TVM Relax; the import registers everything,
once.

The command line, ``relax-grad`` or ``python -m relax_grad``, registers later: when it runs a
command.
"""

from __future__ import annotations

import importlib

from . import _entry

__version__ = "0.3.0"

if not _entry.deferred:
    # First: it refuses an unsupported TVM before other modules use it.
    from .ir import compat as _compat

    # isort: split
    from . import legalize, op, registry, rules, target, tir, transform
    from .autodiff.missing import MissingGradient, missing_gradients
    from .cpu.codegen import cache
    from .cpu.pipeline import pipeline
    from .cpu.threads import get_num_threads, set_num_threads
    from .errors import GradientCheckError, GradientError
    from .functional import derivatives, hvp, jvp, value_and_grad, vjp
    from .gpu import pipeline as _for_gpus
    from .registry import install, register_gradient, register_legalize, uninstall

    install()


#: Modules that differentiation does not need.
_LATE = ("backend", "cli", "coverage", "distributed", "frontend", "testing", "training")


def __getattr__(name: str) -> object:
    """Import the modules that differentiation does not need at their first use."""
    if name in _LATE:
        return importlib.import_module(f".{name}", __name__)
    if name in __all__ and _entry.deferred:
        _entry.register()
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_LATE})


__all__ = [
    "GradientCheckError",
    "GradientError",
    "MissingGradient",
    "__version__",
    "cache",
    "derivatives",
    "get_num_threads",
    "hvp",
    "install",
    "jvp",
    "missing_gradients",
    "pipeline",
    "register_gradient",
    "register_legalize",
    "set_num_threads",
    "target",
    "tir",
    "transform",
    "uninstall",
    "value_and_grad",
    "vjp",
]
