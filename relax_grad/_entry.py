"""The detection of the command line, which imports TVM and registers only when it runs a command.

``--help``, ``--version`` and a wrong command line do not need TVM, whose import takes seconds.
Python imports a package before any of its modules, so the package detects its command line at its
own import.
"""

from __future__ import annotations

import importlib
import os
import sys

#: The file names of the console script on the different systems.
_SCRIPTS = ("relax-grad", "relax-grad.exe", "relax-grad-script.py")


def _is_command_line() -> bool:
    """Tell whether the process is ``relax-grad`` or ``python -m relax_grad``."""
    program = sys.argv[0] if getattr(sys, "argv", None) else ""
    if program != "-m":
        return os.path.basename(program) in _SCRIPTS
    # argv[0] is "-m" while Python looks for the module to run, and it imports the package to find
    # it.
    following = sys.orig_argv[sys.orig_argv.index("-m") + 1 :] if "-m" in sys.orig_argv else []
    return following[:1] == ["relax_grad"]


#: Whether the package is imported and its registration is still pending.
deferred = _is_command_line()


def register() -> None:
    """Run the registration that the import of the package deferred, if any."""
    global deferred
    if deferred:
        deferred = False
        importlib.reload(sys.modules[__package__])
