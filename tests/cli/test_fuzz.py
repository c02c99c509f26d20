"""``relax-grad fuzz``: its report, and the small size of its findings."""

from __future__ import annotations

import re
import sys

import pytest
from processes import run_file, run_python

from relax_grad import cli

#: Two programs; the first differentiates a cosine. They run with the correct rule, a wrong rule and a rule that
#: crashes.
_RUN = """
import os, signal
from tvm import relax
from tvm.ir import Op
import relax_grad
from relax_grad import cli
from relax_grad.cli import fuzz

def wrong(orig_var, orig_call, output_grad, ctx):
    return [relax.op.multiply(output_grad, relax.const(1.5, "float64"))]

def crashing(orig_var, orig_call, output_grad, ctx):
    os.kill(os.getpid(), signal.SIGSEGV)

op = Op.get("relax.cos")
for rule in (None, wrong, crashing):
    if rule is not None:
        op.reset_attr("FPrimalGradient")
        op.set_attr("FPrimalGradient", rule, 10)
    keep = ["--keep", {folder!r}] if rule is wrong else []
    fuzz._INTERVAL = 60 if rule is wrong else 0
    print("exit code", cli.main(["fuzz", "--programs", "2", "--seed", "361", *keep]))
    print("====")
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return the output of the three runs, and the folder of the wrong rule's findings.

    The runs have a separate process. A process that has run compiled code, as this one may have, must not fork.
    """
    if sys.platform == "win32":
        pytest.skip("Windows does not fork processes")
    folder = tmp_path_factory.mktemp("findings")
    out = run_python(_RUN.format(folder=str(folder)), torch=True)
    return [text.strip() for text in out.split("====")[:3]], folder


def test_no_findings(runs):
    out = runs[0][0]
    assert out.endswith("no findings\nexit code 0")
    assert re.search(r"^2 programs of \d+ statements, with samples of \d+ operators$", out, re.M)
    compared = dict(re.findall(r"compared with ([\w ]+)(?:, which .*)?: (\d+)$", out, re.M))
    assert int(compared["central differences"]) > 0


def test_progress_is_reported(runs):
    """Progress is printed at intervals, so the log of a long session shows that it is alive."""
    assert "\n0 done, 0 findings; programs 0 to 1\n" in runs[0][0]
    assert " done, " not in runs[0][1]
    assert "\n1 done, 1 finding; making program 0 smaller\n" in runs[0][2]


def test_a_wrong_gradient_is_found_and_made_small(runs):
    out = runs[0][1]
    assert out.endswith("s: 1 finding\nexit code 1")
    (source,) = re.findall(r"@I\.ir_module.*?\n# differentiated with respect to .*?\n", out, re.S)
    assert "R.cos(" in source
    calls = re.findall(r"R\.(\w+)\(", source.partition("cls = Module")[2])
    assert len([name for name in calls if name not in ("dataflow", "output", "const")]) <= 2


def test_a_finding_is_a_script_that_runs(runs):
    (script,) = runs[1].iterdir()
    assert "along a direction:" in run_file(script)


def test_a_crash_is_a_finding_and_not_the_end(runs):
    out = runs[0][2]
    assert "program 0: the process ended by SIGSEGV" in out
    assert "2 programs of " in out
    assert out.endswith("s: 1 finding\nexit code 1")


def test_wrong_use(capsys):
    for wrong in (["--minutes", "0"], ["--programs", "-1"], ["--through", "jax"]):
        with pytest.raises(SystemExit) as stopped:
            cli.main(["fuzz", *wrong])
        assert stopped.value.code == 2
        assert capsys.readouterr().err


def test_a_folder_that_cannot_be_made(tmp_path, capsys):
    """The command refuses the folder before the session, without a traceback."""
    file = tmp_path / "findings"
    file.write_text("")
    for folder in (file, file / "more"):
        with pytest.raises(SystemExit) as stopped:
            cli.main(["fuzz", "--programs", "1", "--keep", str(folder)])
        assert stopped.value.code == 2
        message = f"argument --keep: cannot make the folder {folder}: "
        assert message in capsys.readouterr().err
