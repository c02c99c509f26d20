"""The command line: its actions, output and exit codes."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tvm
from processes import without_torch
from tvm import relax

import relax_grad
from relax_grad import cli
from relax_grad.cli import _text
from relax_grad.cli import check as check_command
from relax_grad.testing.samples import Sample, _sample, sampled_operators

ROOT = Path(__file__).parents[2]


@pytest.fixture
def makers(monkeypatch):
    """Return a table for the test's own samples, in place of the package's."""
    table = {}
    monkeypatch.setattr(_sample, "_makers", table)
    return table


def smooth(rng):
    yield Sample([rng.normal(size=(2, 3))], note="plain")
    yield Sample([rng.normal(size=(4,))], symbolic={0: {0: "n"}}, order=1)


def wrong(rng):
    """Yield a kink that counts as smooth: central differences give the mean of both slopes."""
    yield Sample([np.zeros((2,))], function=relax.op.nn.relu, note="at the kink")
    yield Sample([np.ones((2,))], function=relax.op.nn.relu)


def kink(rng):
    yield Sample([np.ones((2,))], smooth=False, torch=lambda torch, x: torch.relu(x))


def broken(rng):
    def function(x):
        raise ValueError("Traceback (most recent call last)\n  somewhere in C++\nthe reason\n")

    yield Sample([np.ones((2,))], function=function)


def broken_maker(rng):
    raise RuntimeError("no samples today")
    yield


def run(capsys, *argv) -> tuple[int, str]:
    code = cli.main(["check", *argv])
    return code, capsys.readouterr().out


@pytest.mark.parametrize(
    ("patterns", "selected"),
    [
        (["relax.nn.conv2d"], ["relax.nn.conv2d"]),
        (["nn.conv2d"], ["relax.nn.conv2d"]),
        (["conv2d"], ["relax.nn.conv2d"]),
        (["conv2d", "nn.conv2d"], ["relax.nn.conv2d"]),
        (["exp", "conv2d"], ["relax.exp", "relax.nn.conv2d"]),
        (["nn.*"], ["relax.nn.conv2d", "relax.nn.relu"]),
        (["ex?"], ["relax.exp"]),
        ([], ["relax.exp", "relax.nn.conv2d", "relax.nn.relu"]),
    ],
)
def test_select(makers, patterns, selected):
    makers.update(dict.fromkeys(["relax.nn.conv2d", "relax.exp", "relax.nn.relu"], smooth))
    assert check_command.select(patterns) == selected


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("conv2", "no operator 'conv2'; did you mean relax.nn.conv2d"),
        ("nn.con2d", "no operator 'nn.con2d'; did you mean relax.nn.conv2d"),
        ("qqqq", "no operator 'qqqq'; --list shows the operators"),
        ("my.qqqq", "; relax_grad.testing.check_gradients checks yours"),
        ("argmax", "relax.argmax has no gradient to check: the result consists of integers"),
        ("exp,log", "no operator 'exp,log'; separate names by spaces: exp log"),
    ],
)
def test_an_unknown_operator_is_refused_with_its_neighbours(capsys, name, message):
    with pytest.raises(SystemExit) as caught:
        cli.main(["check", "conv2d", name])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_an_operator_without_samples_is_named_as_such(makers, capsys):
    makers["relax.exp"] = smooth
    for name, hint in (
        ("nn.conv2d", "\n"),
        ("grad.conv2d_backward_data", "; order 2 of its forward"),
    ):
        with pytest.raises(SystemExit) as caught:
            cli.main(["check", name])
        assert caught.value.code == 2
        message = f"relax.{name} has a gradient rule, but its rule has no samples{hint}"
        assert message in capsys.readouterr().err


def test_all_ok(makers, capsys):
    makers["relax.exp"] = smooth
    code, out = run(capsys)
    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith(f"relax_grad {relax_grad.__version__}, apache-tvm ")
    assert lines[0].endswith(", target llvm")
    assert re.fullmatch(
        r"relax\.exp +2 samples +order 2 +max error \d\.\de-\d\d +\d+\.\d s  ok", lines[1]
    )
    assert "Not checked, as their rules have no samples: " in out
    assert "relax.nn.relu," in out
    assert "relax.argmax" not in out  # it has no gradient
    assert "relax.nn.conv2d" in out
    assert "relax.grad." not in out
    assert re.fullmatch(r"1 operator, 2 samples, \d+ s: all ok", lines[-1])


def test_a_named_operator_does_not_bring_up_the_others(makers, capsys):
    makers["relax.exp"] = smooth
    code, out = run(capsys, "exp", "--order", "1")
    assert code == 0
    assert "order 1" in out
    assert "relax.nn.conv2d" not in out


def test_failures_do_not_stop_the_rest(makers, capsys):
    makers.update(
        {
            "relax.abs": broken_maker,
            "relax.cos": broken,
            "relax.exp": smooth,
            "relax.nn.relu": wrong,
        }
    )
    code, out = run(capsys, "--order", "1")
    assert code == 1
    operators = {line.split()[0]: line for line in out.splitlines() if line.startswith("relax.")}
    assert operators["relax.abs"].endswith("FAILED")
    assert operators["relax.cos"].endswith("FAILED")
    assert operators["relax.exp"].endswith("ok")
    assert operators["relax.nn.relu"].endswith("FAILED")
    assert "2 samples" in operators["relax.nn.relu"]
    assert "    making the samples: RuntimeError: no samples today" in out
    assert "    sample 0, float64: ValueError: the reason" in out
    assert "    sample 0 (at the kink), float64: GradientCheckError: relu, order 1: " in out
    assert "somewhere in C++" not in out
    assert out.splitlines()[-1].endswith(": 3 operators FAILED")


def test_json(makers, capsys):
    makers.update({"relax.cos": broken, "relax.exp": smooth})
    code = cli.main(["check", "--order", "1", "--json"])
    out, err = capsys.readouterr()
    assert code == 1
    report = json.loads(out)
    assert list(report) == ["versions", "through", "target", "operators", "unsampled", "seconds"]
    assert report["versions"]["relax_grad"] == relax_grad.__version__
    cos, exp = report["operators"]
    assert list(cos) == [
        *("operator", "verdict", "samples", "skipped", "order", "max_error", "seconds"),
        "failures",
    ]
    (failure,) = cos["failures"]
    assert cos["verdict"] == "failed"
    assert failure["check"] == "sample 0, float64"
    assert failure["error"] == "ValueError"
    assert failure["message"].endswith("the reason")
    assert (exp["operator"], exp["verdict"], exp["samples"]) == ("relax.exp", "ok", 2)
    assert "relax.nn.conv2d" in report["unsampled"]
    assert err.splitlines()[-1].endswith(": 1 operator FAILED")


def test_list_in_json(capsys):
    assert cli.main(["check", "--list", "--json", "conv2d", "nn.relu"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["operators"] == ["relax.nn.conv2d", "relax.nn.relu"]
    assert report["versions"]["relax_grad"] == relax_grad.__version__


def test_json_has_no_numbers_that_json_lacks(capsys):
    _text.print_json({"a": [float("nan"), 1.5, (float("-inf"),)]})
    assert json.loads(capsys.readouterr().out) == {"a": [None, 1.5, [None]]}


def test_verbose_shows_the_traceback(makers, capsys):
    makers["relax.cos"] = broken
    code, out = run(capsys, "--verbose")
    assert code == 1
    assert "somewhere in C++" in out
    assert 'raise ValueError("Traceback' in out


def test_all_checks_every_dtype_and_symbolic_shapes(makers, monkeypatch):
    makers["relax.exp"] = smooth
    checked = []

    def check(self, **settings):
        checked.append({k: v for k, v in settings.items() if k in ("order", "dtype", "symbolic")})
        raise ArithmeticError("not run")

    monkeypatch.setattr(Sample, "check", check)
    outcome = check_command.check_operator("relax.exp", all_kinds=True)
    first, second = {"order": 2}, {"order": 1}
    halves = [{"dtype": dtype} for dtype in ("float32", "float16", "bfloat16")]
    assert checked == [
        first,
        *({**first, **dtype} for dtype in halves),
        second,
        *({**second, **dtype} for dtype in halves),
        {**second, "symbolic": True},
    ]
    assert [name for name, _ in outcome.failures][:3] == [
        "sample 0 (plain), float64",
        "sample 0 (plain), float32",
        "sample 0 (plain), float16",
    ]
    assert outcome.failures[-1][0] == "sample 1, symbolic shape"


def test_through_tvm_checks_only_orders_that_its_pass_supports(makers, capsys):
    def maker(rng):
        split = {"indices_or_sections": [1]}
        yield Sample([np.ones((2,))], split, symbolic={0: {0: "n"}}, tvm_order=1)

    makers["relax.split"] = maker
    code, out = run(capsys, "--through", "tvm", "--all")
    assert code == 0, out
    assert ", through tvm, target llvm\n" in out
    assert " order 1 " in out
    code, out = run(capsys, "--all")
    assert code == 0, out
    assert ", through relax_grad, target llvm\n" in out
    assert " order 2 " in out


def test_a_kink_is_skipped_and_counted(makers, capsys):
    makers["relax.nn.relu"] = kink
    code, out = run(capsys)
    assert code == 0
    assert re.search(r"relax\.nn\.relu +0 samples .* skipped\n", out)
    assert "Skipped 1 sample at a kink" in out
    assert "--torch" in out


def test_a_kink_is_compared_with_torch(makers, capsys, torch):
    makers["relax.nn.relu"] = kink
    code, out = run(capsys, "--torch")
    assert code == 0, out
    assert re.search(r"relax\.nn\.relu +1 sample +order 1 .* ok\n", out)
    assert "Skipped" not in out


def test_a_difference_from_torch_fails(makers, capsys, torch):
    def other_function(rng):
        yield Sample([np.ones((2,))], torch=lambda torch, x: 2 * x.exp())

    makers["relax.exp"] = other_function
    code, out = run(capsys, "--torch", "--order", "1")
    assert code == 1
    assert "    sample 0, PyTorch: GradientCheckError: relax.exp: the result differs" in out


def test_torch_must_be_installed_for_torch(monkeypatch, capsys):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torch" else find_spec(name)
    )
    with pytest.raises(SystemExit) as caught:
        cli.main(["check", "conv2d", "--torch"])
    assert caught.value.code == 2
    assert "pip install 'torch>=2.11,<" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--order", "0"], "the order must be at least 1, but it is 0"),
        (["--through", "torch"], "invalid choice: 'torch'"),
        (["--order", "two"], "invalid _order value: 'two'"),
        (["--target", "abacus"], "no target 'abacus'"),
        (["--target", '{"kind": '], "no target"),
        (["--everything"], "unrecognized arguments: --everything"),
    ],
)
def test_a_wrong_command_line(capsys, argv, message):
    with pytest.raises(SystemExit) as caught:
        cli.main(["check", "conv2d", *argv])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_target_in_json(makers, capsys):
    makers["relax.exp"] = smooth
    code, out = run(capsys, "--order", "1", "--target", '{"kind": "llvm", "opt-level": 1}')
    assert code == 0, out
    assert "target llvm\n" in out


def test_target_of_this_machine(makers, capsys, monkeypatch):
    makers["relax.exp"] = smooth
    targets = []
    compiled = tvm.compile
    monkeypatch.setattr(
        tvm, "compile", lambda mod, target: targets.append(target) or compiled(mod, target)
    )
    assert run(capsys, "--order", "1", "--target", "host")[0] == 0
    assert set(map(str, targets)) == {str(relax_grad.target.host())}


def test_list(capsys):
    assert cli.main(["check", "--list"]) == 0
    assert capsys.readouterr().out.splitlines() == sampled_operators()
    assert cli.main(["check", "--list", "conv2d"]) == 0
    assert capsys.readouterr().out == "relax.nn.conv2d\n"


@pytest.mark.parametrize("argv", [[], ["check"]])
def test_help(capsys, argv):
    with pytest.raises(SystemExit) as caught:
        cli.main([*argv, "--help"])
    assert caught.value.code == 0
    assert "check" in capsys.readouterr().out


def test_interrupt(makers, monkeypatch, capsys):
    makers["relax.exp"] = smooth

    def interrupted(self, **settings):
        raise KeyboardInterrupt

    monkeypatch.setattr(Sample, "check", interrupted)
    assert cli.main(["check"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.skipif(os.name != "posix", reason="signals are POSIX's")
def test_interrupt_that_tvm_swallows(makers, capsys):
    """TVM turns an interrupt in a callback into a RuntimeError."""
    ran = []

    def maker(rng):
        def function(x):
            ran.append(x)
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                raise RuntimeError from None

        yield Sample([np.ones((2,))], function=function)
        yield Sample([np.ones((2,))], function=function)

    makers.update({"relax.exp": maker, "relax.sin": maker})
    before = signal.getsignal(signal.SIGINT)
    assert cli.main(["check"]) == 130
    assert len(ran) == 1
    assert signal.getsignal(signal.SIGINT) is before


class _Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_bar_on_a_terminal(makers, monkeypatch):
    pytest.importorskip("rich", reason="rich is not installed: there is no progress bar")
    makers.update({"relax.exp": smooth, "relax.nn.relu": wrong})
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert cli.main(["check", "--order", "1"]) == 1
    shown = terminal.getvalue()
    assert "\x1b[" in shown
    assert "1/2" in shown
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert re.search(r"the worst element is \[\d\],", text)  # not parsed as markup
    assert text.splitlines()[-1].endswith(": 1 operator FAILED")


def test_plain_lines_without_rich(makers, monkeypatch):
    makers["relax.exp"] = smooth
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    assert cli.main(["check", "exp", "--order", "1"]) == 0
    assert "\x1b[" not in terminal.getvalue()
    assert "relax.exp" in terminal.getvalue()


def test_progress_within_an_operator(makers, monkeypatch, capsys):
    makers.update({"relax.exp": smooth, "relax.nn.relu": wrong})
    monkeypatch.setattr(check_command, "_INTERVAL", 0.0)
    assert cli.main(["check", "--order", "1"]) == 1
    shown = [line for line in capsys.readouterr().out.splitlines() if " done; " in line]
    assert shown == [
        f"    {done} of 2 done; {operator}: {check}"
        for done, operator in enumerate(["relax.exp", "relax.nn.relu"])
        for check in ("samples", "sample 1 of 2, float64", "sample 2 of 2, float64")
    ]


def test_a_quick_check_shows_no_progress(makers, capsys):
    makers["relax.exp"] = smooth
    assert cli.main(["check", "exp", "--order", "1"]) == 0
    assert " done; " not in capsys.readouterr().out


def test_version_of_the_module():
    result = subprocess.run(
        [sys.executable, "-m", "relax_grad", "--version"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.startswith(f"relax_grad {relax_grad.__version__}, apache-tvm 0.")


@pytest.mark.skipif(os.name != "posix", reason="signals are POSIX's")
def test_control_c():
    """A real interrupt while a sample is being compiled ends the process at once."""
    process = subprocess.Popen(
        [sys.executable, "-m", "relax_grad", "check", "conv2d"],
        cwd=ROOT,
        env=without_torch(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert "target llvm" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert err.startswith("interrupted\n")
    assert "Traceback" not in err
