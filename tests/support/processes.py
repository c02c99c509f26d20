"""Python subprocesses for actions that cannot be undone in this process."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

#: The environment variable with the directory of compiled functions of a test run.
OBJECTS = "RELAX_GRAD_TEST_OBJECTS"

#: TVM imports PyTorch if it is installed, which takes longer than the rest of TVM's import.
_WITHOUT_TORCH = "import sys; sys.modules['torch'] = None\n"


def without_torch(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return an environment, or that of this process, for fresh interpreters without PyTorch.

    TVM imports PyTorch where it is installed, which takes twice as long as the rest of the start of
    most commands.
    """
    environment = os.environ if environment is None else environment
    paths = [str(Path(__file__).with_name("without_torch")), environment.get("PYTHONPATH", "")]
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def run_python(
    code: str, environment: Mapping[str, str] | None = None, *, torch: bool = False
) -> str:
    """Run code in another process and return its output; without ``torch``, PyTorch appears not to
    be installed.

    With an environment or PyTorch, the process is a fresh interpreter. Otherwise it has imported
    TVM, but not relax_grad: it is forked, where the system forks processes.
    """
    code = textwrap.dedent(code)
    if environment is None and not torch and hasattr(os, "fork"):
        with tempfile.TemporaryDirectory() as folder:
            program = Path(folder, "program.py")
            program.write_text(code)
            status, output, errors = _template().run_apart(program)
        assert status == 0, errors
        return output.strip()
    return _run(["-c", code if torch else _WITHOUT_TORCH + code], environment)


@functools.cache
def _template() -> Forks:
    """Return the parent of the processes of this test process."""
    forks = Forks(os.environ, _WITHOUT_TORCH + "import tvm, tvm.relax")
    atexit.register(forks.close)
    return forks


def run_guard(module: str, *arguments) -> tuple[int, str, str]:
    """Call ``main`` of a module that runs kernels between guard pages, in a process of its own.

    Return the exit code, the output and the errors. The process is forked from one that has
    imported TVM, relax_grad and what these modules share. The pool of TVM has one thread, since
    others do not survive a fork, and since the allocator of workspaces is written in Python.
    """
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "guard.py")
        program.write_text(f"import {module}\n{module}.main(*{arguments!r})\n")
        return _guards().run_apart(program)


@functools.cache
def _guards() -> Forks:
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "TVM_NUM_THREADS": "1",
    }
    forks = Forks(environment, _WITHOUT_TORCH + "import guard.kernels, guard.worker")
    atexit.register(forks.close)
    return forks


def run_file(path: Path) -> str:
    """Run a script in a fresh interpreter, to which PyTorch appears not to be installed, and return
    its output."""
    return _run([str(path)], without_torch())


def _run(arguments: list[str], environment: Mapping[str, str] | None) -> str:
    process = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ if environment is None else environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()


#: Runs each program that it reads from stdin in a forked process, and prints the exit code.
_FORKS = """
import os, runpy, sys, traceback
{preamble}

def redirect(path, number):
    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(file, number)

for line in sys.stdin:
    program, output, errors = line.rstrip("\\n").split("\\t")
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            redirect(output, 1)
            if errors == output:
                os.dup2(1, 2)
            else:
                redirect(errors, 2)
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
    """Forked processes that begin with imported packages, which takes longer than most of their
    programs.

    Each process is isolated from the others. By default they have imported TVM and relax_grad, and
    load the functions that other tests have compiled.
    """

    IMPORTED = f"import relax_grad, tvm; relax_grad.cache(os.environ.get({OBJECTS!r}))"

    def __init__(self, environment: Mapping[str, str], preamble: str = IMPORTED):
        self._parent = subprocess.Popen(
            [sys.executable, "-c", _FORKS.format(preamble=preamble)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, program: Path) -> tuple[int, str]:
        """Run a program and return its exit code and its output, including errors."""
        output = program.with_suffix(".out")
        return self._run(program, output, output), output.read_text()

    def run_apart(self, program: Path) -> tuple[int, str, str]:
        """Run a program and return its exit code, its output and its errors."""
        output, errors = program.with_suffix(".out"), program.with_suffix(".err")
        code = self._run(program, output, errors)
        return code, output.read_text(), errors.read_text()

    def _run(self, program: Path, output: Path, errors: Path) -> int:
        self._parent.stdin.write(f"{program}\t{output}\t{errors}\n")
        self._parent.stdin.flush()
        return int(self._parent.stdout.readline())

    def close(self) -> None:
        """End the parent of the forked processes."""
        self._parent.communicate(timeout=60)


@contextlib.contextmanager
def forks_of_source() -> Iterator[Forks]:
    """Yield forked processes that import this checkout, or skip the test where the system does not
    fork."""
    from relax_grad.testing.fuzz.session import can_fork

    if not can_fork():
        pytest.skip("this system does not fork processes")
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    forks = Forks({**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))})
    try:
        yield forks
    finally:
        forks.close()
