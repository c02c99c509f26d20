"""``relax-grad doctor``: its report, and the faults that it finds."""

from __future__ import annotations

import re

import pytest

from relax_grad import cli, registry
from relax_grad.cli import _diagnosis
from relax_grad.cpu import threads


def run(capsys, *argv) -> tuple[int, str]:
    code = cli.main(["doctor", *argv])
    return code, capsys.readouterr().out


def test_no_problems(capsys):
    code, out = run(capsys)
    assert code == 0
    assert out.endswith("\nno problems\n")
    names = [line.partition(":")[0] for line in out.splitlines() if re.match(r"\w+: ", line)]
    assert names[:4] == ["Python", "system", "NumPy", "PyTorch"]
    assert (
        len(re.findall(r"^  .* \d+\.\d s  ok$", out, re.MULTILINE)) == len(_diagnosis._CHECKED) + 1
    )


def test_without_checks(capsys):
    code, out = run(capsys, "--no-check")
    assert code == 0
    assert "checks:" not in out


def test_a_wrong_gradient(capsys, monkeypatch):
    def wrong(_name):
        raise ValueError("Traceback from C++\nthe gradient is wrong\n")

    monkeypatch.setattr("relax_grad.testing.samples.samples", wrong)
    code, out = run(capsys)
    assert code == 1
    assert out.count("FAILED") == len(_diagnosis._CHECKED)
    assert "! gradient of relax.matmul: ValueError: the gradient is wrong\n    report it" in out
    assert out.endswith(f"{len(_diagnosis._CHECKED)} problems\n")


@pytest.mark.parametrize(
    ("ffi", "numpy", "found"),
    [
        ("0.1.14.post1", "2.2.6", []),
        (None, "1.26.4", []),
        ("0.1.15", "2.2.6", ["apache-tvm-ffi 0.1.15 crashes"]),
        ("0.1.14", "2.3.0", ["with NumPy 2.3.0, relax.training"]),
        ("0.2.0", "3.0", ["apache-tvm-ffi 0.2.0 crashes", "with NumPy 3.0, relax.training"]),
    ],
)
def test_incompatible_versions_are_reported(ffi, numpy, found):
    problems = list(_diagnosis._of_versions(ffi, numpy))
    assert len(problems) == len(found)
    for problem, start in zip(problems, found, strict=True):
        assert problem.what.startswith(start)
        assert problem.remedy.startswith("pip install '")


def test_more_threads_than_cores(capsys, monkeypatch):
    monkeypatch.setattr(threads, "cores", lambda: 2)
    monkeypatch.setattr(threads, "get_num_threads", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    monkeypatch.delenv("TVM_NUM_THREADS", raising=False)
    code, out = run(capsys, "--no-check")
    assert code == 1
    assert "! TVM uses 8 threads, but this process has 2 cores" in out
    assert re.search(r"threads: +8 of TVM, 2 cores \(OMP_NUM_THREADS=8\)", out)


def test_idle_cores_are_reported(monkeypatch):
    monkeypatch.setattr(threads, "cores", lambda: 4)
    monkeypatch.setattr(threads, "get_num_threads", lambda: 2)
    facts = dict(_diagnosis.facts())
    assert facts["threads"].startswith("2 of TVM, 4 cores; relax_grad.set_num_threads() uses all")
    assert not list(_diagnosis.find_problems())


def test_an_operator_that_is_not_known(monkeypatch):
    known = registry.operators()
    monkeypatch.setattr(registry, "operators", lambda: [*known, "relax.call_tir"])
    unknown = registry.Classification("relax.call_tir", "unclassified")
    classify = registry.classify
    monkeypatch.setattr(
        registry, "classify", lambda name: unknown if name == "relax.call_tir" else classify(name)
    )
    assert dict(_diagnosis.facts())["operators"].endswith("; unknown to relax_grad: relax.call_tir")
