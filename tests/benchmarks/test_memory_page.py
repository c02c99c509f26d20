"""The table and the figure of memory against time in docs/trainer.md are those of the
measurement."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = json.loads((ROOT / "benchmarks" / "results" / "memory.json").read_text())


@pytest.fixture(scope="module")
def figure():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import _memory_figure
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
    return _memory_figure


def test_the_table_has_all_rows(figure):
    page = (ROOT / "docs" / "trainer.md").read_text().splitlines()
    rows = [line for line in page if re.match(r"\| (ResNet|GPT|ViT)", line)]
    assert rows == figure.table(RESULTS)


def test_the_figure_is_drawn_from_the_results(figure, tmp_path):
    matplotlib = pytest.importorskip("matplotlib", reason="matplotlib draws the figure")
    page = (ROOT / "docs" / "trainer.md").read_text()
    kept = (figure.FOLDER / "memory.svg").read_text()
    if f"Matplotlib v{matplotlib.__version__}," not in kept:
        pytest.skip("another version of matplotlib drew the figure of the page")
    figure.draw(RESULTS, tmp_path)
    assert "```{chart} memory\n" in page
    drawn = (tmp_path / "memory.svg").read_text()
    assert drawn == kept, "python benchmarks/memory.py --plot"
