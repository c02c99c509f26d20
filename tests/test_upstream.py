"""The scripts of docs/upstream show faults of TVM: each ends with the fault on a TVM that has
it."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from sweep import share

from relax_grad.testing.fuzz.session import can_fork

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/upstream.md"
SCRIPTS = sorted((ROOT / "docs/upstream").glob("*.py"))

#: Runs scripts in forked processes, which share the import of TVM without relax_grad; prints the
#: exit code and the output of each.
_RUN = """
import json, os, runpy, sys, traceback
import numpy, tvm
from tvm import relax

for path in sys.argv[1:]:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            os.dup2(writer, 1), os.dup2(writer, 2)
            os.close(reader), os.close(writer)
            runpy.run_path(path, run_name="__main__")
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)
    os.close(writer)
    output = open(reader, errors="replace").read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert "relax_grad" not in sys.modules
    print(json.dumps([code, output]), flush=True)
"""


def described(script: Path) -> tuple[str, str]:
    """Return the first line of a script's docstring, and the sign of the fault."""
    title, *_, seen = ast.get_docstring(ast.parse(script.read_text())).splitlines()
    assert seen.startswith("Seen: "), script
    return title, seen.removeprefix("Seen: ")


def test_the_page_has_every_script_under_its_title():
    page = PAGE.read_text()
    included = re.findall(
        r"^### (.+)$\n(?:(?!^###).*\n)*?```\{literalinclude\} upstream/(\w+)\.py$", page, re.M
    )
    assert sorted(name for _, name in included) == [script.stem for script in SCRIPTS]
    for title, name in included:
        assert described(ROOT / f"docs/upstream/{name}.py")[0] == f"{title}.", name


def test_the_corrections_exist():
    for path in re.findall(r"`(relax_grad/[\w/.]+)`", PAGE.read_text()):
        assert (ROOT / path).exists(), path


def test_the_scripts_do_not_use_relax_grad():
    for script in SCRIPTS:
        assert "relax_grad" not in script.read_text(), script
        assert len(script.read_text().splitlines()) < 50, script


@pytest.mark.slow
def test_the_faults_are_seen():
    if not can_fork():
        pytest.skip("this system does not fork processes")
    scripts = [
        script for script in share(SCRIPTS) if "import torch" not in script.read_text() or _torch()
    ]
    process = subprocess.run(
        [sys.executable, "-c", _RUN, *map(str, scripts)],
        capture_output=True,
        text=True,
        timeout=1800,
        env={**os.environ, "TVM_NUM_THREADS": "1"},
        check=True,
    )
    outcomes = [json.loads(line) for line in process.stdout.splitlines() if line.startswith("[")]
    mended = []
    for script, (code, output) in zip(scripts, outcomes, strict=True):
        _, sign = described(script)
        if code == 0:
            mended.append(script.name)
        elif sign.startswith("SIG"):
            assert signal.Signals(-code).name == sign, f"{script.name}: {output}"
        else:
            assert code == 1, f"{script.name}: {output}"
            assert sign in output, f"{script.name}: {output}"
    assert not mended, (
        f"this TVM has mended {', '.join(mended)}: say so in docs/upstream.md, and restrict the "
        "corrections to the versions that need them"
    )


def _torch() -> bool:
    return importlib.util.find_spec("torch") is not None
