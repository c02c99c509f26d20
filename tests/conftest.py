"""Fixtures and hooks of all tests."""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
from pathlib import Path

import legalized
import machine_code
import pytest
import tvm
from processes import OBJECTS

import relax_grad
from relax_grad.ir import compat
from relax_grad.testing._program import without_assertions

pytest_plugins = ["cpu_times", "script_frames", "slices", "steady_draws", "time_limit"]

#: Folders and files whose tests compile functions without the assertions on their arguments, which
#: are half of the code. The assertions stay on for every operator in testing/test_samples.py, and
#: for whole programs in cpu/test_pipeline.py, training/ and the examples.
WITHOUT_ASSERTIONS = (
    *("autodiff/", "backend/", "cpu/dispatch/", "cpu/passes/", "cpu/schedule/"),
    *("frontend/", "gpu/", "legalize/", "op/", "rules/", "tir/", "topi/"),
    *("cpu/test_functions_of_float32.py", "cpu/test_random_pipelines.py"),
    *("test_edges.py", "test_functional.py"),
)

#: Files in those folders whose errors come from these assertions.
WITH_ASSERTIONS = ("frontend/torch/run/test_wrap.py",)

#: Folders whose tests compile without LLVM's optimizations, where the target has no level and the
#: pipeline is TVM's. Equal calls share the functions of their legalization.
UNOPTIMIZED = (
    *("autodiff/", "backend/", "frontend/", "ir/", "legalize/", "op/", "rules/", "testing/"),
    *("tir/", "topi/"),
)

#: Those of them where that holds for relax_grad's pipeline too: it has tests of its own, in cpu/
#: and training/.
UNOPTIMIZED_PIPELINES = ("backend/", "frontend/")

#: Folders and files whose tests compile training steps and whole programs without being about
#: compilation. Functions that other tests have compiled are loaded from a directory of the test
#: run.
CACHED = (
    *("cpu/dispatch/", "cpu/passes/", "distributed/", "examples/", "frontend/", "training/"),
    *("autodiff/test_imported_models.py", "autodiff/test_imported_steps.py"),
)


def _skipped(*_, **__):
    pytest.skip("this apache-tvm-ffi crashes the process in tvm.ir.save_json")


def pytest_configure(config):
    config.pluginmanager.register(machine_code)
    if not compat.saves_json():
        tvm.ir.save_json = _skipped
    # Neither do tests find the programs of this user, nor does the user get those of the tests.
    os.environ["RELAX_GRAD_CACHE"] = "0"
    if OBJECTS not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="relax_grad_objects_")
        os.environ[OBJECTS] = folder.name
        config.add_cleanup(folder.cleanup)
        config.add_cleanup(lambda: os.environ.pop(OBJECTS))


def pytest_collection_finish() -> None:
    """Let the collector search for cycles seldom, and not among the tests and modules, which stay
    until the end: it would take a twentieth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(5000, 20, 20)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    """Apply the settings to a test and to its fixtures."""
    path = item.path.relative_to(Path(__file__).parent).as_posix()
    with contextlib.ExitStack() as stack:
        if path.startswith(WITHOUT_ASSERTIONS) and not path.startswith(WITH_ASSERTIONS):
            stack.enter_context(without_assertions())
        if path.startswith(UNOPTIMIZED):
            pipelines = path.startswith(UNOPTIMIZED_PIPELINES)
            stack.enter_context(machine_code.unoptimized(pipelines=pipelines))
            stack.enter_context(legalized.sharing())
        if path.startswith(CACHED):
            stack.enter_context(relax_grad.cache(os.environ[OBJECTS]))
        return (yield)


def pytest_report_header() -> str:
    try:
        import torch
    except ImportError:
        return "torch: not installed, parity tests are skipped"
    return f"torch: {torch.__version__}"


@pytest.fixture(scope="session")
def torch():
    """Return PyTorch, or skip the test if it is not installed."""
    return pytest.importorskip("torch", reason="PyTorch is not installed: no parity to check")
