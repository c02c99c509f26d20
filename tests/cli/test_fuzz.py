"""``relax-grad fuzz``: its report, and the small size of its findings."""

from __future__ import annotations

import json
import re
import sys
import time
from types import SimpleNamespace

import pytest
from processes import run_file, run_python

from relax_grad import cli
from relax_grad.testing.fuzz import session
from relax_grad.testing.fuzz.outcomes import Outcome

#: Two programs; the first differentiates a cosine. They run with the correct rule, a wrong rule and
#: a rule that crashes.
_RUN = """
import contextlib, io, json, os, signal
from tvm import relax
from tvm.ir import Op
import relax_grad
from relax_grad import cli
from relax_grad.cli import fuzz

def wrong(orig_var, orig_call, output_grad, ctx):
    return [relax.op.multiply(output_grad, relax.const(1.5, "float64"))]

def crashing(orig_var, orig_call, output_grad, ctx):
    os.kill(os.getpid(), signal.SIGSEGV)

def printed(argv):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(argv)
    return code, json.loads(out.getvalue()), err.getvalue()

op = Op.get("relax.cos")
for rule in (None, wrong, crashing):
    if rule is not None:
        op.reset_attr("FPrimalGradient")
        op.set_attr("FPrimalGradient", rule, 10)
    keep = ["--keep", {folder!r}] if rule is wrong else []
    fuzz._INTERVAL = 60 if rule is wrong else 0
    print("exit code", cli.main(["fuzz", "--programs", "2", "--seed", "3881", *keep]))
    print("====")
print(json.dumps(printed(["fuzz", "--programs", "1", "--seed", "3881", "--json"])))
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return the output of the three runs, and the folder of the wrong rule's findings.

    The runs have a separate process. A process that has run compiled code, as this one may have,
    must not fork.
    """
    if sys.platform == "win32":
        pytest.skip("Windows does not fork processes")
    folder = tmp_path_factory.mktemp("findings")
    out = run_python(_RUN.format(folder=str(folder)), torch=True)
    return [text.strip() for text in out.split("====")], folder


def test_no_findings(runs):
    out = runs[0][0]
    assert out.endswith("no findings\nexit code 0")
    assert re.search(r"^2 programs of \d+ statements, with samples of \d+ operators?$", out, re.M)
    compared = dict(re.findall(r"compared with ([\w ]+)(?:, which .*)?: (\d+)$", out, re.M))
    assert int(compared["central differences"]) > 0


def test_progress_is_reported(runs):
    """Progress is printed for the first program and then at intervals: the log shows that a session
    is alive."""
    assert "\n0 done, 0 findings; program 0\n" in runs[0][0]
    assert "\n1 done, 0 findings; program 1\n" in runs[0][0]
    assert re.findall(".* done, .*", runs[0][1]) == ["0 done, 0 findings; program 0"]
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


def test_json(runs):
    code, report, err = json.loads(runs[0][3])
    assert code == 1
    assert list(report) == [
        *("versions", "seed", "programs", "statements", "compared", "findings", "seconds"),
        "interrupted",
    ]
    assert (report["seed"], report["programs"], report["interrupted"]) == (3881, 1, False)
    (finding,) = report["findings"]
    assert list(finding) == ["program", "kind", "message", "source", "script"]
    assert finding["kind"] == "crash: SIGSEGV"
    assert "R.cos(" in finding["source"]
    assert "0 done, 0 findings; program 0" in err


def test_the_time_is_shown_while_a_program_runs(monkeypatch):
    monkeypatch.setattr(session, "_WAIT", 0.01)
    ticks = []
    result = session._in_a_process(lambda: time.sleep(0.2), 60, lambda: ticks.append(1))
    assert result is None
    assert ticks


def test_batches_grow():
    """The first results appear after one program."""
    steps = []
    subject = SimpleNamespace(batch=4, draw=lambda seed, i: i, size=int, parts=lambda _: set())
    drawn = session.Session(0, subject, steps.append)
    drawn.check = lambda programs: [Outcome(None) for _ in programs]
    assert not list(drawn.run(float("inf"), 12))
    assert steps == [
        *("program 0", "programs 1 to 2", "programs 3 to 6", "programs 7 to 10", "program 11"),
    ]


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
