"""The runner of the benchmarks: rows that are chosen, printed and stored."""

from __future__ import annotations

import json

import pytest
import run
from _benchmark import HERE, Benchmark, file_of_machine, in_process, named, shown, text

HEAD = {"date": "2026-01-05", "processor": "some", "threads": 2, "tvm": "1", "peak": 150}


#: The last row fails.
MADE = Benchmark(
    lambda args: {"one": 1, "two": 2, "three": 0},
    lambda number, args: {"half": number / 2, "of": 1 / number},
    "a.json",
    lambda args: dict(HEAD),
)


def run_with(*options: str) -> int:
    return run.run(MADE, run._parser("name", "", MADE).parse_args(options))


def test_all_benchmarks_have_a_line_of_help():
    assert {"speed", "tune", "web"} < set(run.names())
    assert all(len(line) < 82 and line.endswith(".") for line in run.names().values())
    assert all("BENCHMARK = " in (HERE / f"{name}.py").read_text() for name in run.names())


def test_names_groups_and_parts_choose_rows():
    class Row:
        group = "conv"

    rows = {"a 1": Row(), "a 12": Row(), "b 1": None}
    assert list(run.chosen(rows, ["conv"])) == ["a 1", "a 12"]
    assert list(run.chosen(rows, ["b", "a 1"])) == ["a 1", "b 1"]
    assert list(run.chosen(rows, ["1"])) == list(run.chosen(rows, [])) == list(rows)
    with pytest.raises(SystemExit, match="no row contains 'c'"):
        run.chosen(rows, ["c"])


def test_other_rows_are_measured_after_a_failure(capsys, tmp_path):
    path = tmp_path / "new/a.json"
    assert run_with("--json", str(path)) == 1
    printed = capsys.readouterr().out
    assert "two: half 1; of 0.5\n" in printed
    assert "failed: three" in printed
    assert [row["name"] for row in json.loads(path.read_text())["rows"]] == ["one", "two"]


def test_rows_that_are_not_measured_stay(tmp_path):
    path = tmp_path / "a.json"
    old = [{"name": name, "half": 7.0} for name in ("two", "gone", "one")]
    path.write_text(json.dumps({**HEAD, "date": "2026-01-02", "peak": 300, "rows": old}))
    assert run_with("--only", "one", "--json", str(path)) == 0
    new = json.loads(path.read_text())
    assert new["rows"] == [
        {"name": "one", "half": 0.5, "of": 1.0},
        {"name": "two", "date": "2026-01-02", "half": 7.0},
    ]
    assert (new["date"], new["peak"]) == ("2026-01-05", 300)


@pytest.mark.parametrize(("key", "other"), [("processor", "other"), ("threads", 4), ("tvm", "2")])
def test_rows_of_other_machines_and_versions_stay_apart(tmp_path, key, other):
    path = tmp_path / "a.json"
    path.write_text(json.dumps({**HEAD, key: other, "rows": []}))
    with pytest.raises(SystemExit, match=f"rows with {key} {other}, .*: .* --json FILE"):
        run_with("--only", "one", "--json", str(path))


def test_a_file_has_a_line_for_each_row():
    layout = named("errors")
    rows = {"a": {"x": {"y": [1, 2]}}, "b": {"x": "z" * 1000, "more": [1]}}
    contents = layout.pack({"about": {"tvm": "1"}}, rows)
    assert layout.unpack(contents) == rows
    assert json.loads(text(contents)) == contents
    assert text(contents).splitlines()[:4] == [
        "{",
        ' "about": {"tvm": "1"},',
        ' "errors": {',
        '  "a": {"x": {"y": [1, 2]}},',
    ]


def test_figures_of_parts_have_a_line_each():
    assert shown("a", {"ms": {"x": 1.23456, "y": None}}) == "a, ms: x 1.235; y None"
    assert shown("a", {"name": "a", "us": [1, 2.5], "by": {"x": 1}}) == "a: us 1 / 2.5; by x 1"


def test_a_machine_has_a_file():
    assert file_of_machine("AMD EPYC", "znver5") == "amd-epyc-znver5.json"


def test_a_function_runs_in_a_process_of_its_own():
    assert in_process("os", "getenv", "A", environment={"A": "b"}) == "b"
    with pytest.raises(RuntimeError, match="KeyError"):
        in_process("operator", "getitem", {}, "a")
