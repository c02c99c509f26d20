"""The library that trains without Python: ``trainer.h`` for C++17, and ``relax_grad_trainer.h`` for
C and languages that call C."""

from pathlib import Path

__all__ = ["folder"]


def folder() -> Path:
    """Return the folder of the C++ sources and of their ``CMakeLists.txt``.

    Examples
    --------
    >>> import relax_grad.runtime
    >>> sorted(each.name for each in relax_grad.runtime.folder().glob("trainer.*"))
    ['trainer.cc', 'trainer.h']
    """
    return Path(__file__).parent
