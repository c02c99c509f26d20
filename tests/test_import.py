"""The cost of ``import relax_grad`` on top of ``import tvm``."""

from __future__ import annotations

import os
import sys

import pytest
from processes import run_python

#: Seconds of processor time, which the load of a machine hardly changes.
LIMIT = 0.3
RUNS = 5

MEASURE = """
import time
import tvm, tvm.relax
start = time.process_time()
import relax_grad
print(time.process_time() - start)
"""

LOADED = """
import sys
import tvm, tvm.relax
before = set(sys.modules)
import relax_grad
for name in sorted(set(sys.modules) - before):
    print(name)
"""


#: Let Python write the bytecode, as it does for an installed package.
ENVIRONMENT = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}


def test_is_quick():
    """Measure the fastest of several runs: other processes only add time. The first run writes the
    bytecode."""
    run_python(MEASURE, ENVIRONMENT, torch=True)
    times = []
    while len(times) < RUNS and min(times, default=LIMIT) >= LIMIT:
        times.append(float(run_python(MEASURE, ENVIRONMENT, torch=True)))
    assert min(times) < LIMIT, times


def test_loads_nothing_else():
    """Every module outside of the standard library is one that TVM has loaded already."""
    names = run_python(LOADED, ENVIRONMENT, torch=True).split()
    assert "relax_grad.rules" in names
    top = {name.partition(".")[0] for name in names} - {"relax_grad"}
    assert not {name for name in top if name not in sys.stdlib_module_names}
    late = {"backend", "cli", "coverage", "distributed", "frontend", "testing", "training"}
    late |= {"cpu.dispatch", "cpu.kernel", "cpu.schedule", "dispatch", "schedule"}
    assert late.isdisjoint(name.removeprefix("relax_grad.") for name in names)


EVERY = """
import importlib, pkgutil, warnings
import relax_grad
has_torch = importlib.util.find_spec("torch") is not None
for module in pkgutil.walk_packages(relax_grad.__path__, "relax_grad.", onerror=lambda name: None):
    if module.name.endswith("__main__") or "torch" in module.name and not has_torch:
        continue
    with warnings.catch_warnings():
        for category in (DeprecationWarning, PendingDeprecationWarning, SyntaxWarning):
            warnings.filterwarnings("error", category=category, module="relax_grad")
        importlib.import_module(module.name)
    print(module.name)
"""


def test_every_module_is_imported():
    """The newest and the oldest packages have the names that modules take from them, and Python and
    NumPy announce the end of none."""
    pytest.importorskip("onnx", reason="the package onnx is not installed: extra onnx")
    pytest.importorskip("mpi4py", reason="the package mpi4py is not installed: extra mpi")
    names = run_python(EVERY, ENVIRONMENT, torch=True).split()
    assert len(names) > 500


def test_lazy_modules_are_attributes_of_the_package():
    names = ["backend", "cli", "coverage", "distributed", "frontend", "testing", "training"]
    code = f"""
import relax_grad
assert {{*{names}, *relax_grad.__all__}} <= {{*dir(relax_grad)}}
for name in {names}:
    print(getattr(relax_grad, name).__name__.removeprefix("relax_grad."))
print(hasattr(relax_grad, "nothing"))
"""
    assert run_python(code).split() == [*names, "False"]
