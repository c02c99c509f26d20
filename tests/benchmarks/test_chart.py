"""Charts and tables of training steps and of their memory are made from the committed
measurements."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import _charts
import pytest
import tvm
from _benchmark import MEASURED

from relax_grad import registry
from relax_grad.ir import compat

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"


@pytest.fixture
def measured():
    return json.loads((MEASURED / "memory.json").read_text())


@pytest.fixture
def times():
    return json.loads((MEASURED / "steps.json").read_text())


def test_the_picture_is_of_the_measurements(measured, times):
    text = (MEASURED / "steps.svg").read_text()
    assert text == _charts.steps_chart(measured, times), (
        "python benchmarks/run.py frameworks --draw"
    )
    root = ElementTree.fromstring(text)
    svg = "{http://www.w3.org/2000/svg}"
    bars = [
        bar
        for panel in _charts.panels(measured, times)
        for group in panel.groups.values()
        for bar in group
    ]
    assert len(list(root.iter(f"{svg}path"))) == sum(bar.length is not None for bar in bars)
    assert all(bar.reason for bar in bars if bar.length is None)
    # Text fits: a sign is at most 0.6 of the size of the font wide.
    size, whole = float(root.get("font-size")), float(root.get("width"))
    for label in root.iter(f"{svg}text"):
        width = 0.6 * float(label.get("font-size", size)) * len(label.text)
        if label.get("text-anchor") == "end":
            assert float(label.get("x")) >= width
        else:
            assert float(label.get("x")) + width <= whole, label.text
    # On a page of 400 pixels, 360 are the picture's.
    assert size * 360 / whole >= 10


@pytest.mark.parametrize("path", sorted(MEASURED.glob("*.svg")), ids=lambda path: path.stem)
def test_each_colour_has_one_for_dark_pages(path):
    pattern = r"<style>@media \(prefers-color-scheme: dark\) \{(.*?)\n\}</style>"
    before, style, after = re.split(pattern, path.read_text("utf-8"), flags=re.DOTALL)
    used = re.findall(r'\b(fill|stroke)(?:="|: )(#\w{6})', before + after)
    replaced = re.findall(r'^\[.*\b(fill|stroke).*(#\w{6})"\] \{\1: #\w{6}', style, re.MULTILINE)
    assert used
    assert set(replaced) == set(used)


def test_the_times_name_the_machine_and_the_contestants(times):
    assert {"date", "processor", "target", "threads", "tvm", "torch", "load"} <= set(times)
    for row in times["rows"]:
        assert list(row["ms"])[:2] == ["relax_grad", "PyTorch"]
        assert ("JAX" in row["ms"]) == ("jax" in times)
        missing = [name for name, ms in row["ms"].items() if ms is None]
        assert missing == list(row.get("reason", {}))
        assert all(ms is None or ms > 0 for ms in row["ms"].values())


def test_a_long_bar_is_cut_and_keeps_its_number(measured, times):
    times["rows"] = [{"step": "MLP 1-2, 3", "ms": {"relax_grad": 2.0, "TVM": 2000.0}}]
    root = ElementTree.fromstring(_charts.steps_chart(measured, times))
    texts = [label.text for label in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "1000 TVM alone" in texts
    assert max(map(len, texts)) < 60


def test_the_first_page_has_the_measured_figures(measured):
    text = README.read_text()
    assert "\n".join(_charts.steps_table(measured)) in text
    assert 'src="docs/_measured/steps.svg"' in text
    for version in (measured["tvm"], measured["torch"].partition("+")[0]):
        assert version in text
    # No other time, size or ratio stands on the first page.
    first = re.sub(
        r"```.*?```", "", text.partition("<!-- end of the first page -->")[0], flags=re.DOTALL
    )
    assert re.findall(r"\d+(?:\.\d+)? (?:ms|MB|s)\b", first) == []
    ratios = re.findall(r"\d\.\d+x|\b0\.\d+\b(?!\.)", first)
    assert set(ratios) <= set(re.findall(r"[\d.]+x?", "\n".join(_charts.steps_table(measured))))


def test_the_first_page_counts_the_operators():
    if compat.parse_version(tvm.__version__)[:2] != (0, 27):
        pytest.skip("the pages have the numbers of operators of TVM 0.27")
    forward = [name for name in registry.operators() if not registry.is_backward_operator(name)]
    entries = [registry.classify(name) for name in forward]
    ours = [entry for entry in entries if entry.kind == "differentiable"]
    # TVM's registrations: those that stay, and those that are replaced.
    theirs = [entry for entry in ours if entry.rule == "TVM" or entry.corrects]
    text = " ".join(README.read_text().split())
    assert f"{len(ours)} of TVM's {len(forward)} operators have a [gradient]" in text
    assert f"TVM alone has {len(theirs)}." in text


def test_the_table_of_memory_has_all_rows(measured):
    figures = pytest.importorskip("_figures", reason="the extra 'bench' is missing")
    page = (ROOT / "docs/trainer.md").read_text().splitlines()
    rows = [line for line in page if re.match(r"\| (ResNet|GPT|ViT)", line)]
    assert rows == figures.memory_table(measured)


def test_the_figure_of_memory_is_drawn_from_the_results(measured, tmp_path):
    matplotlib = pytest.importorskip("matplotlib", reason="matplotlib draws the figure")
    figures = pytest.importorskip("_figures", reason="the extra 'bench' is missing")
    kept = (MEASURED / "memory.svg").read_text()
    if f"Matplotlib v{matplotlib.__version__}," not in kept:
        pytest.skip("another version of matplotlib drew the figure of the page")
    figures.draw_memory(measured, tmp_path)
    assert "```{chart} memory\n" in (ROOT / "docs/trainer.md").read_text()
    assert (tmp_path / "memory.svg").read_text() == kept, "python benchmarks/run.py memory --draw"
