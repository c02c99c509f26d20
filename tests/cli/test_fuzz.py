"""``relax-grad fuzz``: what it reports, and that what it finds is small.

Each runs in a fresh process: a process that has run compiled code is not one to fork.
"""

from __future__ import annotations

import re
import sys

import pytest
from processes import run_file, run_python

from relax_grad import cli

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows does not fork processes")

#: A rule that is wrong, or that crashes, in the place of that of an operator; then the command.
_RUN = """
import os, signal
from tvm import relax
from tvm.ir import Op
import relax_grad
from relax_grad import cli

def wrong(orig_var, orig_call, output_grad, ctx):
    return [relax.op.multiply(output_grad, relax.const(1.01, "float64"))]

def crashing(orig_var, orig_call, output_grad, ctx):
    os.kill(os.getpid(), signal.SIGSEGV)

def replace(name, rule):
    op = Op.get(name)
    op.reset_attr("FPrimalGradient")
    op.set_attr("FPrimalGradient", rule, 10)

{replaced}
print("exit code", cli.main(["fuzz", *{arguments!r}]))
"""


def run(*arguments, replaced="") -> str:
    return run_python(_RUN.format(replaced=replaced, arguments=arguments))


def test_nothing_found():
    out = run("--programs", "4", "--seed", "4")
    assert out.endswith("nothing found\nexit code 0")
    assert re.search(r"^4 programs of \d+ statements, with samples of \d+ operators$", out, re.M)
    compared = dict(re.findall(r"compared with ([\w ]+)(?:, which .*)?: (\d+)$", out, re.M))
    assert int(compared["central differences"]) > 0


def test_a_wrong_gradient_is_found_and_made_small(tmp_path):
    replaced = 'replace("relax.cos", wrong)'
    out = run("--programs", "3", "--seed", "13", "--keep", str(tmp_path), replaced=replaced)
    assert out.endswith("exit code 1")
    source = re.search(r"@I\.ir_module.*?\n# differentiated with respect to .*?\n", out, re.S)[0]
    assert len(re.findall(r"R\.(?!function|Tensor|dataflow|output|const)", source)) <= 2
    assert "R.cos(" in source
    (script,) = sorted(tmp_path.iterdir())[:1]
    assert "along a direction:" in run_file(script)


def test_a_crash_is_a_finding_and_not_the_end():
    out = run("--programs", "3", "--seed", "13", replaced='replace("relax.cos", crashing)')
    assert out.endswith("exit code 1")
    assert "the process ended by SIGSEGV" in out
    assert out.count("R.cos(") >= 1
    assert "\n3 programs of " in out


def test_wrong_use(capsys):
    for wrong in (["--minutes", "0"], ["--programs", "-1"], ["--through", "jax"]):
        with pytest.raises(SystemExit) as stopped:
            cli.main(["fuzz", *wrong])
        assert stopped.value.code == 2
    assert "it must be positive, not 0" in capsys.readouterr().err
