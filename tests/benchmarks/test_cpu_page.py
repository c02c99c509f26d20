"""docs/cpu.md and its charts are made from the committed measurements; README.md agrees with
them."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import _charts
import pytest
from _benchmark import MEASURED, file_of_machine

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def machines():
    return _charts.machines()


@pytest.fixture(scope="module")
def measured(machines):
    """Return the file of the machine that was measured last."""
    return machines[0]


@pytest.fixture(scope="module")
def others():
    return json.loads((MEASURED / "cpu_others.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def tables():
    """Return the module of the directives."""
    pytest.importorskip("sphinx", reason="Sphinx makes the tables: extra docs")
    sys.path.insert(0, str(ROOT / "docs/_ext"))
    try:
        import measured_cpu
    finally:
        sys.path.remove(str(ROOT / "docs/_ext"))
    return measured_cpu


def test_each_measurement_names_its_units_and_date(measured, others):
    keys = {key for row in measured["rows"] for key in row} - {"group", "name", "date"}
    assert keys | {"peak"} == set(measured["units"])
    assert measured["peak"] > 0
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", measured["date"])
    for name, measurement in others.items():
        assert measurement["unit"], name
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", measurement["about"]["recorded"]), name


def test_each_kernel_has_one_family(measured):
    rows = [row["name"] for rows in _charts.families(measured).values() for row in rows]
    assert sorted(rows) == sorted(row["name"] for row in measured["rows"] if row["group"] != "step")
    assert all(_charts.families(measured).values())


@pytest.mark.parametrize("chart", _charts.CHARTS)
def test_the_charts_are_of_the_measurements(measured, chart):
    text = (MEASURED / f"cpu_{chart}.svg").read_text("utf-8")
    assert text == _charts.cpu_chart(measured, chart), "python benchmarks/run.py speed --draw"
    bars = list(ElementTree.fromstring(text).iter(f"{SVG}rect"))
    assert len(bars) == len(_charts.CHARTS[chart][1](measured))
    assert f"```{{chart}} cpu_{chart}\n" in (ROOT / "docs/cpu.md").read_text("utf-8")


def test_each_machine_has_its_file(machines):
    names = [file_of_machine(machine["processor"], machine["target"]) for machine in machines]
    assert sorted(names) == sorted(path.name for path in (MEASURED / "cpu").glob("*.json"))
    dates = [machine["date"] for machine in machines]
    assert dates == sorted(dates, reverse=True)


#: Two machines, of which the second was measured before.
NEW = {
    "processor": "Processor",
    "target": "new",
    "date": "2026-02-01",
    "rows": [
        {"group": "conv", "name": "a", "least": 0.5, "ratios": {"torch": 0.4}},
        {"group": "conv", "name": "b", "least": 0.5, "ratios": {"torch": 1.6}},
        {"group": "symbolic", "name": "c", "least": 0.9, "ratios": {"torch": 1.25}},
        {
            "group": "step",
            "name": "net",
            "least": 0.57,
            "ratios": {"torch": 0.58, "torch.compile": 0.64},
            "compiling_s": 26.6,
            "memory_mb": {"relax_grad": 9, "torch": 10},
        },
    ],
}
OLD = {
    **NEW,
    "target": "old",
    "date": "2026-01-01",
    "rows": [
        {**NEW["rows"][0], "ratios": {"torch": 0.7}},
        {**NEW["rows"][3], "ratios": {"torch": 0.9}},
    ],
}


def test_the_tables_have_the_figures(tables, others):
    steps = list(tables.Steps.lines(None, [NEW, OLD]))
    assert steps[2:] == [
        "| Processor (new) | net | 0.58 (0.57) | 0.64 | 27 s | 0.90 |",
        "| Processor (old) | net | 0.90 (0.57) |  | 27 s | 0.90 |",
    ]
    families = list(tables.Families.lines(None, [NEW, OLD]))
    assert families[2:] == [
        "| Processor (new) | convolutions | 2 | 0.80 (0.50) |",
        "| Processor (new) | with a symbolic batch | 1 | 1.25 (0.90) |",
        "| Processor (old) | convolutions | 1 | 0.70 (0.50) |",
    ]
    slower = list(tables.Slower.lines(None, [NEW, OLD]))
    assert slower[0].startswith("On the Processor (new), 2 of the 3 rows")
    assert slower[4:] == ["| b | 1.60 (0.50) |", "| c, symbolic batch | 1.25 (0.90) |"]
    with_peak = {**NEW, "peak": 400, "rows": [{**row, "gflops": 300} for row in NEW["rows"][:2]]}
    closest = list(tables.Closest.lines(None, [with_peak, OLD]))
    assert closest[2:] == ["| Processor (new) | b | 1.60 (0.50) | 0.75 |"]
    (without,) = tables.Closest.lines(None, [OLD])
    assert without.startswith("No file of a machine")
    times = list(tables.CompileTimes.lines(None, others))
    assert "| U-Net, 4x3x128x128 | 1.4 | 7.4 | 0.2 | 9.0 | 2.0 | 30.7 |" in times
    errors = list(tables.Winograd.lines(None, others))
    assert "|  | data gradient | 4.0e-7, 0.47 | 8.2e-6, 0.29 | 1.2e-6, 0.84 | 3.3e-7 |" in errors


def test_the_slower_products_have_the_forms_and_the_mean_share_of_the_peak(tables):
    row = {"group": "small", "form": "NN", "sizes": [3, 4, 5], "gflops": 50}
    rows = [
        {**row, "median": 1.2, "least": 1.06},
        {**row, "form": "TT", "gflops": 200, "median": 1.1, "least": 1.3},
        {**row, "form": "NT", "median": 1.2, "least": 1.05},
        {**row, "sizes": [3, 4, 6], "median": 1.0, "least": 1.3},
    ]
    part = {"target": "new", "peak": [1, 1000], "rows": rows}
    found = list(tables.SlowerProducts.of_width(None, {"processor": "Processor"}, part))
    assert found == [["Processor, new", "3 x 4 x 5", "NN 1.20 (1.06), TT 1.10 (1.30)", "0.10"]]


def test_the_conditions_name_machine_versions_and_date(tables, machines):
    lines = list(tables.Conditions.lines(SimpleNamespace(arguments=[]), machines))
    assert len(lines) == len(machines)
    for line, machine in zip(lines, machines, strict=True):
        for key in ("processor", "target", "tvm", "torch", "date"):
            assert machine[key] in line
    (line,) = tables.Conditions.lines(SimpleNamespace(arguments=["winograd"]), machines)
    assert "Zen 5" in line
    assert "1 thread," in line


def test_no_ratio_and_no_time_is_written_by_hand():
    page = re.sub(r"```.*?```", "", (ROOT / "docs/cpu.md").read_text("utf-8"), flags=re.DOTALL)
    assert re.findall(r"\d+\.\d\d\b", page) == []
    assert re.findall(r"\b\d[\d.]* to \d[\d.]*(?= times| %)", page) == []
    assert re.findall(r"\d+\.\d s\b|\d+ %", page) == []


def test_the_readme_has_the_ranges_of_the_steps(machines):
    """Of the last measurement of a machine of each maker."""
    text = " ".join((ROOT / "README.md").read_text("utf-8").split())
    (claim,) = re.findall(r"from a perceptron to a GPT, are (.*?) \(\[all figures", text)
    last = {machine["processor"].partition(" ")[0]: machine for machine in reversed(machines)}
    ranges = []
    for machine in last.values():
        ratios = [row["ratios"]["torch"] for row in machine["rows"] if row["group"] == "step"]
        ranges.append(f"{1 / max(ratios):.1f}x to {1 / min(ratios):.1f}x")
    assert sorted(re.findall(r"[\d.]+x to [\d.]+x", claim)) == sorted(ranges)
