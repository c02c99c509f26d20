"""Python processes of their own, for what cannot be undone in this one."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

#: TVM imports PyTorch where it is installed, which takes longer than all else that TVM imports.
_WITHOUT_TORCH = "import sys; sys.modules['torch'] = None\n"


def run_python(
    code: str, environment: Mapping[str, str] | None = None, *, torch: bool = False
) -> str:
    """Run code in a fresh interpreter, as if PyTorch were not installed by default, and return what it prints."""
    code = textwrap.dedent(code)
    return _run(["-c", code if torch else _WITHOUT_TORCH + code], environment)


def run_file(path: Path) -> str:
    """Run a script in a fresh interpreter and return what it prints."""
    return _run([str(path)], None)


def _run(arguments: list[str], environment: Mapping[str, str] | None) -> str:
    found = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ if environment is None else environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()
