"""docs/cpu.md and its charts are made from the committed measurements; README.md agrees with
them."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

cpu_chart = pytest.importorskip("cpu_chart")

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "docs/_measured"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def measured():
    return json.loads(cpu_chart.SOURCE.read_text("utf-8"))


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


def test_the_rows_are_those_of_the_results(measured):
    found, group = [], None
    for line in (ROOT / "benchmarks/results/results.md").read_text("utf-8").splitlines():
        if line.startswith("## "):
            title = re.match(r"## (\w+): time", line)
            group = title and title[1]
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if group and len(cells) > 4 and re.fullmatch(r"[\d.]+", cells[1]):
            found.append((group, cells[0], *map(float, cells[1:4])))
    rows = measured["rows"]
    keys = ("group", "name", "ms", "least")
    assert found == [(*(row[key] for key in keys), row["ratios"]["torch"]) for row in rows]


def test_each_measurement_names_its_units_and_date(measured, others):
    assert {key for row in measured["rows"] for key in row} - {"group", "name"} == set(
        measured["units"]
    )
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", measured["date"])
    for name, each in others.items():
        assert each["unit"], name
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", each["about"]["recorded"]), name


def test_each_kernel_has_one_family(measured):
    rows = [row["name"] for rows in cpu_chart.families(measured).values() for row in rows]
    assert sorted(rows) == sorted(row["name"] for row in measured["rows"] if row["group"] != "step")
    assert all(cpu_chart.families(measured).values())


@pytest.mark.parametrize("theme", cpu_chart.THEMES)
@pytest.mark.parametrize("chart", cpu_chart.CHARTS)
def test_the_charts_are_of_the_measurements(measured, chart, theme):
    text = (MEASURED / f"cpu_{chart}_{theme}.svg").read_text("utf-8")
    assert text == cpu_chart.draw(measured, chart, theme), "run python benchmarks/cpu_chart.py"
    bars = list(ElementTree.fromstring(text).iter(f"{SVG}rect"))
    assert len(bars) == len(cpu_chart.CHARTS[chart][1](measured))
    assert f"_measured/cpu_{chart}_{theme}.svg" in (ROOT / "docs/cpu.md").read_text("utf-8")


def test_the_tables_have_the_figures(tables, measured, others):
    steps = list(tables.Steps.lines(None, measured))
    assert len(steps) == 2 + 5
    assert "| ResNet-18, 8x3x224x224 | 0.58 (0.57) | 0.64 | 27 s | 0.90 |" in steps
    families = list(tables.Families.lines(None, measured))
    assert "| convolutions | 129 | 0.55 (0.57) |" in families
    slower = list(tables.Slower.lines(None, measured))
    assert slower[0].startswith("8 of the 222 rows")
    assert len(slower) == 3 + 2 + 8
    assert "| cross-entropy 64x10 | 1.30 (0.95) |" in slower
    times = list(tables.CompileTimes.lines(None, others))
    assert "| MobileNetV2, 8x3x224x224 | 13.2 | 12.2 | 3.0 |" in times
    errors = list(tables.Winograd.lines(None, others))
    assert "|  | data gradient | 4.0e-7, 0.47 | 8.2e-6, 0.29 | 1.2e-6, 0.84 | 3.3e-7 |" in errors


def test_the_conditions_name_machine_versions_and_date(tables, measured):
    (line,) = tables.Conditions.lines(SimpleNamespace(arguments=[]), measured)
    for key in ("processor", "target", "tvm", "torch", "date"):
        assert measured[key] in line
    (line,) = tables.Conditions.lines(SimpleNamespace(arguments=["winograd"]), measured)
    assert "Zen 5" in line
    assert "1 thread," in line


def test_no_ratio_and_no_time_is_written_by_hand():
    page = re.sub(r"```.*?```", "", (ROOT / "docs/cpu.md").read_text("utf-8"), flags=re.DOTALL)
    assert re.findall(r"\d+\.\d\d\b", page) == []
    assert re.findall(r"\b\d[\d.]* to \d[\d.]*(?= times| %)", page) == []
    assert re.findall(r"\d+\.\d s\b|\d+ %", page) == []


def test_the_readme_has_the_range_of_the_steps(measured):
    ratios = [row["ratios"]["torch"] for row in measured["rows"] if row["group"] == "step"]
    text = " ".join((ROOT / "README.md").read_text("utf-8").split())
    assert f"took {min(ratios):.2f} to {max(ratios):.2f} of PyTorch's time" in text
