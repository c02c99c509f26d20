"""Whether the package is imported by its own command line, which registers only when it runs a command.

``--help``, ``--version`` and a wrong command line need nothing of TVM, whose import takes seconds. But Python
imports a package before any of its modules, so that the package has to know at its import.
"""

from __future__ import annotations

import importlib
import os
import sys

#: The console script, as it is installed on each system.
_SCRIPTS = ("relax-grad", "relax-grad.exe", "relax-grad-script.py")


def _is_command_line() -> bool:
    """Tell whether the process is ``relax-grad`` or ``python -m relax_grad``."""
    program = sys.argv[0] if getattr(sys, "argv", None) else ""
    if program != "-m":
        return os.path.basename(program) in _SCRIPTS
    # So argv begins until Python has found the module to run, for which it imports the package.
    following = sys.orig_argv[sys.orig_argv.index("-m") + 1 :] if "-m" in sys.orig_argv else []
    return following[:1] == ["relax_grad"]


#: Whether the package is imported, and nothing is registered yet.
deferred = _is_command_line()


def register() -> None:
    """Register what the import of the package has put off, if it has."""
    global deferred
    if deferred:
        deferred = False
        importlib.reload(sys.modules[__package__])
