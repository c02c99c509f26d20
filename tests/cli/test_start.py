"""The command line without a command: it does not import TVM, and other processes register as
usual."""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from processes import without_torch

from relax_grad import cli
from relax_grad.cli import _fold, _text
from relax_grad.testing import _program

#: Seconds for the fastest of several runs. One run takes a tenth of a second on an idle machine.
LIMIT = 1.0
RUNS = 5

SCRIPT = "import sys\nfrom relax_grad.cli import main\nsys.exit(main())\n"
REGISTERED = """
import tvm
print(tvm.ir.Op.get("relax.grad.conv2d_backward_weight").has_attr("FLegalize"))
"""

COMMANDS = ("check", "coverage", "doctor", "fuzz", "worker")
HELP = [["--help"], *([command, "--help"] for command in COMMANDS), ["--version"]]
WRONG = [[], ["nothing"], ["check", "--order", "0"], ["coverage", "--nothing"], ["fuzz", "--seed"]]


@pytest.fixture
def program(tmp_path):
    """Return the command of the console script, which has the form that pip writes."""
    path = tmp_path / "relax-grad"
    path.write_text(SCRIPT)
    return [str(path)]


MODULE = ["-m", "relax_grad"]


def run(*arguments: str, code: int = 0, **options) -> subprocess.CompletedProcess:
    process = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        **options,
    )
    assert process.returncode == code, process.stderr
    return process


def imported(process: subprocess.CompletedProcess) -> set[str]:
    """Return the modules that a process with ``-X importtime`` has imported."""
    lines = [line for line in process.stderr.splitlines() if line.startswith("import time:")]
    return {line.rpartition("|")[2].strip() for line in lines}


@pytest.mark.parametrize(
    ("arguments", "code"),
    [*((arguments, 0) for arguments in HELP), *((arguments, 2) for arguments in WRONG)],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_no_tvm_is_imported(arguments, code):
    process = run("-X", "importtime", *MODULE, *arguments, code=code)
    names = imported(process)
    if "--help" in arguments:
        assert re.search(r"exit codes:\n  0  .+\n  1  .+\n  2  .+\n  130  ", process.stdout)
        assert "--json" in process.stdout or arguments == ["--help"]
    assert "relax_grad.cli.fuzz" in names
    top = {name.partition(".")[0] for name in names} - {"relax_grad"}
    # Other names come from the site's own hooks, for example those of an editable installation.
    assert top.isdisjoint({"tvm", "tvm_ffi", "numpy", "torch", "rich"})
    assert ("usage: relax-grad" in process.stderr) == (code == 2)


def test_no_tvm_is_imported_by_the_console_script(program):
    for arguments, code in ((["--help"], 0), (["--version"], 0), ([], 2)):
        process = run("-X", "importtime", *program, *arguments, code=code)
        assert "relax_grad.cli.fuzz" in imported(process)
        assert "tvm" not in imported(process)


@pytest.mark.parametrize("arguments", [HELP[0], *HELP[1:5]], ids=" ".join)
def test_help_lists_the_exit_codes(arguments, capsys):
    with pytest.raises(SystemExit):
        cli.main(arguments)
    codes = capsys.readouterr().out.partition("exit codes:")[2]
    assert re.findall(r"^  (\d+)  ", codes, re.M) == ["0", "1", "2", "130"]


def test_every_command_can_be_interrupted(monkeypatch, capsys):
    def interrupted(*args):
        raise KeyboardInterrupt

    for command in ("coverage", "doctor"):
        monkeypatch.setattr(
            importlib.import_module(f"relax_grad.cli.{command}"), "run", interrupted
        )
        assert cli.main([command]) == 130
        assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion(shell, capsys):
    pytest.importorskip("shtab", reason="shtab is not installed: no completion scripts")
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--print-completion", shell])
    assert stopped.value.code == 0
    script = capsys.readouterr().out
    for word in (*COMMANDS, "--through", "--programs", "--no-check"):
        assert word in script


def test_completion_without_its_library(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    for shell, message in (("bash", "pip install 'shtab>=1.7'"), ("fish", "invalid choice")):
        with pytest.raises(SystemExit) as stopped:
            cli.main(["--print-completion", shell])
        assert stopped.value.code == 2
        assert message in capsys.readouterr().err


MESSAGE = b"[12:34:56] /project/src/relax/op.cc:123: Warning: an index\n"


def test_messages_are_counted():
    written = []
    _fold.fold([MESSAGE, b"a line\n", MESSAGE], written.append)
    _fold.fold([b"[12:34] another line\n"], written.append)
    assert written == [
        b"a line\n",
        b"2 messages of TVM not shown; --verbose shows them\n",
        b"[12:34] another line\n",
    ]


@pytest.mark.skipif(os.name != "posix", reason="messages are folded on POSIX only")
def test_a_crash_does_not_lose_its_last_line(tmp_path):
    """The script has the console script's name, so that it does not import TVM."""
    file = tmp_path / "relax-grad"
    file.write_text(
        "import os, signal\n"
        "from relax_grad.cli._stderr import folded\n"
        "with folded():\n"
        f"    os.write(2, {MESSAGE!r} + b'LLVM ERROR: out of registers\\n')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    process = run(str(file), code=-signal.SIGKILL)
    assert process.stderr == (
        "LLVM ERROR: out of registers\n1 message of TVM not shown; --verbose shows them\n"
    )


def test_is_quick():
    times = []
    while len(times) < RUNS and min(times, default=LIMIT) >= LIMIT:
        start = time.perf_counter()
        run(*MODULE, "--help")
        times.append(time.perf_counter() - start)
    assert min(times) < LIMIT, times


def test_version_reports_the_running_packages():
    versions = run(*MODULE, "--version").stdout.strip()
    assert versions == _text.versions()  # TVM is imported here, and reports its own version


@pytest.mark.parametrize("program_of", ["module", "script"])
def test_a_command_registers(program_of, program):
    arguments = MODULE if program_of == "module" else program
    process = run(*arguments, "check", "--list", env=without_torch())
    assert "relax.nn.conv2d" in process.stdout.splitlines()


@pytest.mark.parametrize(
    "arguments",
    [["-c", "import relax_grad" + REGISTERED, *MODULE], ["{file}", *MODULE], ["{file}", "--help"]],
    ids=["code", "script", "script with help"],
)
def test_other_processes_register(arguments, tmp_path):
    """They register for any arguments."""
    file = tmp_path / "program.py"
    file.write_text("import relax_grad" + REGISTERED)
    arguments = [argument.format(file=file) for argument in arguments]
    assert run(*arguments, env=without_torch()).stdout == "True\n"


def test_a_package_that_is_run_registers(tmp_path):
    """Its ``__init__`` runs while Python looks for the module to run, like that of relax_grad."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("import relax_grad")
    (package / "__main__.py").write_text(REGISTERED)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.run(
        [sys.executable, "-m", "package", *MODULE],
        env=without_torch({**os.environ, "PYTHONPATH": path}),
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert process.stdout == "True\n"


def test_a_program_of_the_same_name_registers_when_it_asks_for_something(tmp_path):
    file = tmp_path / "relax-grad"
    file.write_text("import relax_grad\nrelax_grad.value_and_grad" + REGISTERED)
    assert run(str(file), env=without_torch()).stdout == "True\n"


def test_passes_are_those_that_differentiate():
    assert tuple(_program.PASSES) == _text.PASSES
