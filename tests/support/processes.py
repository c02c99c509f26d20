"""Python subprocesses for actions that cannot be undone in this process."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

#: TVM imports PyTorch if it is installed, which takes longer than the rest of TVM's import.
_WITHOUT_TORCH = "import sys; sys.modules['torch'] = None\n"


def run_python(
    code: str, environment: Mapping[str, str] | None = None, *, torch: bool = False
) -> str:
    """Run code in a fresh interpreter and return its output; without ``torch``, PyTorch appears not to be installed."""
    code = textwrap.dedent(code)
    return _run(["-c", code if torch else _WITHOUT_TORCH + code], environment)


def run_file(path: Path) -> str:
    """Run a script in a fresh interpreter and return its output."""
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


#: Runs each program that it reads from stdin in a forked process, and prints the exit code.
_FORKS = """
import os, runpy, sys, traceback
import relax_grad, tvm

for line in sys.stdin:
    program, output = line.rstrip("\\n").split("\\t")
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            file = os.open(output, os.O_WRONLY | os.O_CREAT, 0o600)
            os.dup2(file, 1)
            os.dup2(file, 2)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            runpy.run_path(program, run_name="__main__")
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Forks:
    """Forked processes that begin with TVM and relax_grad imported, which takes longer than most of their programs.

    Each process is isolated from the others.
    """

    def __init__(self, environment: Mapping[str, str]):
        self._parent = subprocess.Popen(
            [sys.executable, "-c", _FORKS],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, program: Path) -> tuple[int, str]:
        """Run a program and return its exit code and its output, including errors."""
        output = program.with_suffix(".out")
        self._parent.stdin.write(f"{program}\t{output}\n")
        self._parent.stdin.flush()
        code = int(self._parent.stdout.readline())
        return code, output.read_text()

    def close(self) -> None:
        """End the parent of the forked processes."""
        self._parent.communicate(timeout=60)
