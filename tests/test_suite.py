"""The plugins of this suite: parts of sweeps, draws that do not depend on loaded modules, frames
for TVMScript, processor times, and shared legalizations."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import legalized
import pytest
import script_frames
import sweep
import tvm
from cpu_times import report_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture import providers
from slices import check_lengths, is_in_cases, is_in_part, slice_of
from sweep import at_length, batches
from tvm import relax, tirx, topi
from tvm.relax import block_builder
from tvm.script import from_source

SUPPORT = Path(__file__).parent / "support"


class Item:
    """A test as the plugin of parts sees it."""

    def __init__(self, path: str, is_slow: bool = True, obj=None):
        self.path, self.nodeid, self.obj = Path(path), path, obj
        self._is_slow = is_slow

    def get_closest_marker(self, name: str):
        assert name == "slow"
        return self._is_slow or None


def test_each_long_test_is_in_one_part():
    items = [Item(f"test_{i % 3}.py") for i in range(20)]
    chosen = [is_in_part(items, part, 4) for part in range(4)]
    assert [sum(of_item) for of_item in zip(*chosen, strict=True)] == [1] * 20
    # The tests of each file are taken in turn.
    for file in range(3):
        numbers = [sum(part[file::3]) for part in chosen]
        assert max(numbers) - min(numbers) <= 1


def test_other_tests_are_in_every_part():
    def draws(): ...

    draws.divides_itself = True
    items = [Item("test_a.py", is_slow=False), Item("test_a.py", obj=draws)]
    for part in range(4):
        assert is_in_part(items, part, 4) == [True, True]


def test_no_test_is_without_a_case():
    cases = {"a.py::test_x": 7, "a.py::test_y": 1, "b.py::test_x": 2}
    items = [
        Item(f"{name}[{i}]", is_slow=False) for name, count in cases.items() for i in range(count)
    ]
    parts = [is_in_cases(items, part, 3) for part in range(3)]
    ids = [[item.nodeid for item, ok in zip(items, part, strict=True) if ok] for part in parts]
    assert ids[0] == [
        *(f"a.py::test_x[{i}]" for i in (0, 3, 6)),
        "a.py::test_y[0]",
        "b.py::test_x[0]",
    ]
    assert ids[1] == ["a.py::test_x[1]", "a.py::test_x[4]", "a.py::test_y[0]", "b.py::test_x[1]"]
    assert ids[2] == ["a.py::test_x[2]", "a.py::test_x[5]", "a.py::test_y[0]", "b.py::test_x[0]"]
    assert is_in_cases(items, 0, 1) == [True] * 10


@pytest.mark.parametrize(
    ("cases", "share", "divides", "examples"),
    [(2000, 1.0, True, 20), (1600, 0.08, True, 5), (400, 0.08, False, 5), (50, 1.0, False, 2)],
)
def test_a_sweep_of_many_batches_is_divided(monkeypatch, cases, share, divides, examples):
    monkeypatch.setattr(sweep, "PARTS", 4)
    monkeypatch.setattr(sweep, "SHARE", share)

    @sweep.at_length(cases)
    @given(batches(st.integers()))
    def draws(cases): ...

    assert draws.divides_itself == divides
    assert draws._hypothesis_internal_use_settings.max_examples == examples


def test_a_sweep_has_a_number_of_cases():
    @given(batches(st.integers()))
    def draws(cases): ...

    check_lengths([Item("test_a.py", is_slow=False, obj=draws), Item("test_b.py")])
    with pytest.raises(pytest.UsageError, match=r"test_c\.py is slow and has no number of cases"):
        check_lengths([Item("test_c.py", obj=draws)])
    check_lengths([Item("test_c.py", obj=at_length(10)(draws))])


@pytest.mark.parametrize(
    ("text", "part"), [(None, (0, 1)), ("", (0, 1)), ("1/1", (0, 1)), ("2/4", (1, 4))]
)
def test_a_part_is_written_as_a_fraction(text, part):
    assert slice_of(text) == part


@pytest.mark.parametrize("parts", [2, 6, 12, 100])
def test_the_first_part_has_a_test_of_every_file(parts):
    """The continuous integration runs the first part, so that it has every family of sweeps."""
    files = {f"test_{name}.py": count for name, count in (("a", 1), ("b", 5), ("c", 30))}
    items = [Item(file) for i in range(30) for file, count in files.items() if i < count]
    first = is_in_part(items, 0, parts)
    chosen = [item.path.name for item, ok in zip(items, first, strict=True) if ok]
    assert set(chosen) == set(files)
    assert len(chosen) == sum(-(-count // parts) for count in files.values())


@pytest.mark.parametrize("text", ["0/4", "5/4", "2", "2/", "/4", "1/0", "a/b", "1.5/4"])
def test_a_part_that_is_none_is_refused(text):
    with pytest.raises(pytest.UsageError, match="SLICE must be PART/PARTS"):
        slice_of(text)


def test_a_batch_has_each_case_once():
    # The first draw of a process reads the modules of the project, which takes long in a new clone.
    @settings(max_examples=30, database=None, suppress_health_check=[HealthCheck.too_slow])
    @given(batches(st.sampled_from("abc")))
    def check(cases):
        assert len(cases) == len(set(cases)) <= 3

    check()


def test_modules_that_tests_import_by_their_name_alone_have_different_ones():
    root = Path(__file__).parents[1]
    folders = [root / "tests" / "support", root / "examples", root / "benchmarks"]
    files = [path for folder in folders for path in folder.glob("*.py")]
    packages = [path.parent for folder in folders for path in folder.glob("*/__init__.py")]
    names = [path.stem for path in (*files, *packages)]
    assert {name for name in names if names.count(name) > 1} <= {"__init__"}


@pytest.mark.skipif(
    not os.environ.get("CI"), reason="outside of CI, Hypothesis draws other examples in every run"
)
def test_draws_do_not_depend_on_loaded_modules(tmp_path):
    drawn: list[list[int]] = []

    @settings(max_examples=200, database=None, derandomize=True)
    @given(st.integers(0, 10**9))
    def draw(number):
        drawn[-1].append(number)

    drawn.append([])
    draw()
    file = tmp_path / "module_of_the_project.py"
    numbers = ", ".join(str(123_456_000 + i) for i in range(500))
    file.write_text(f"NUMBERS = [{numbers}]\n")
    spec = importlib.util.spec_from_file_location("module_of_the_project", file)
    sys.modules["module_of_the_project"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["module_of_the_project"])
    providers.CONSTANTS_CACHE.cache.clear()
    drawn.append([])
    try:
        draw()
    finally:
        del sys.modules["module_of_the_project"]
    assert drawn[0] == drawn[1]


def test_times_are_printed_by_folder_and_test(tmp_path):
    (tmp_path / "test_one.py").write_text(
        "import subprocess, sys, time\n"
        "BUSY = 'import time\\nwhile time.process_time() < 0.3: pass'\n"
        "def test_busy(): exec(BUSY)\n"
        "def test_child(): subprocess.run([sys.executable, '-c', BUSY])\n"
        "def test_sleeps(): time.sleep(0.3)\n"
        "def test_server():\n"
        "    command = [sys.executable, '-c', BUSY + '\\nprint(1, flush=True)\\ninput()']\n"
        "    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        "    global server; server = subprocess.Popen(command, **pipes)\n"
        "    assert server.stdout.readline()\n"
        "def test_after_it(): server.communicate(b'1\\n')\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "cpu_times", "--cpu-times", "-n", "1"]
    command += ["--rootdir", ".", "."]  # whatever is in the folders above
    result = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(SUPPORT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout
    times = {
        name: (float(cpu), float(wall))
        for cpu, wall, name in re.findall(
            r"^ *([\d.]+) +([\d.]+) +test_one.py::test_(\w+)$", result.stdout, re.MULTILINE
        )
    }
    assert set(times) == {"busy", "child", "sleeps", "server", "after_it"}
    assert times["child"][0] >= 0.3
    if sys.platform == "linux":  # a process that lives on counts where it works
        assert times["server"][0] >= 0.3
        assert times["after_it"][0] < 0.2
    assert times["sleeps"][0] < 0.2
    assert times["sleeps"][1] >= 0.3


def test_the_report_adds_up():
    cpu = {"a/test_x.py::test_1": 1.0, "a/test_x.py::test_2": 2.0, "a/b/test_y.py::test_3": 4.0}
    lines = [line.split() for line in report_of(cpu, dict.fromkeys(cpu, 1.0))]
    assert ["3.0", "2.0", "2", "a/"] in lines
    assert ["4.0", "1.0", "1", "a/b/test_y.py"] in lines
    assert ["7.0", "3.0", "3", "all"] in lines
    assert ["0", "files", "above", "20", "processor", "seconds"] in lines


def test_files_above_the_budget_are_named():
    cpu = {"a/test_x.py::test_1": 11.0, "a/test_x.py::test_2": 12.0, "a/test_y.py::test_3": 19.0}
    lines = report_of(cpu, dict.fromkeys(cpu, 1.0))
    start = lines.index("1 files above 20 processor seconds")
    assert lines[start + 1 : start + 3] == ["  a/test_x.py", ""]


def test_frames_for_tvmscript_are_those_of_inspect():
    ours, theirs = script_frames.Inspect().stack(), inspect.stack()
    assert [frame.frame for frame in ours] == [frame.frame for frame in theirs]
    assert [frame.function for frame in ours] == [frame.function for frame in theirs]
    for one, other in zip(ours[:4], theirs[:4], strict=True):
        assert (one.filename, one.lineno) == (other.filename, other.lineno)
        assert one.code_context == other.code_context
    assert eval("script_frames.Inspect().stack()")[0].code_context is None


def test_tvmscript_is_parsed_without_the_sources_of_the_stack(monkeypatch):
    def refuse(*_):
        raise AssertionError("TVM reads the source of every frame again: see script_frames.py")

    for name in ("stack", "getouterframes"):
        monkeypatch.setattr(inspect, name, refuse)
    module = from_source(
        "@I.ir_module\n"
        "class Module:\n"
        "    @T.prim_func(private=True, s_tir=True)\n"
        "    def f(a: T.Buffer((3,), 'float32')):\n"
        "        a[0] = T.float32(1)\n"
        "    @R.function\n"
        "    def main(x: R.Tensor((3,), 'float32')):\n"
        "        return x\n"
    )
    assert {variable.name_hint for variable in module.functions} == {"f", "main"}


def test_equal_calls_of_tvm_share_a_function():
    def made(shape=(2, 3), dtype="float32", function=topi.sum, **more):
        x = relax.Var("x", relax.TensorType(shape, dtype))
        function, operands, _ = block_builder.gen_call_tir_inputs(function, x, **more)
        assert len(operands) == 1
        assert operands[0].same_as(x)
        return function

    def own(x):
        return topi.sum(x)

    with legalized.sharing():
        first = made(axis=[1])
        assert made(axis=[1]).same_as(first)
        others = [
            *(made((3, 2), axis=[1]), made(dtype="float64", axis=[1]), made(axis=[0])),
            *(made(function=topi.prod, axis=[1]), made((2, tirx.Var("n", "int64")), axis=[1])),
        ]
        assert not any(other.same_as(first) for other in others)
        with tvm.target.Target("c"):
            assert not made(axis=[1]).same_as(first)
        assert not made(function=own).same_as(made(function=own))
    assert not made(axis=[1]).same_as(first)
