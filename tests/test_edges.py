"""The semantics page: its statements about edge cases match relax_grad, PyTorch and JAX."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import tvm

DOCS = Path(__file__).parents[1] / "docs"
sys.path.insert(0, str(DOCS / "_ext"))

import edges  # noqa: E402
import measure_edges  # noqa: E402

MEASURED = json.loads(measure_edges.RESULTS.read_text())
ROWS = {row["call"]: row for row in MEASURED["edges"]}
EDGES = edges.edges()


def wrong(values: dict, library: str) -> dict:
    """Return the differences from the page, by call."""
    return {
        call: (value, ROWS[call][library])
        for call, value in values.items()
        if value != ROWS[call][library]
    }


def test_every_edge_is_on_the_page_once():
    assert [edge.call for edge in EDGES] == [row["call"] for row in MEASURED["edges"]]
    assert len(ROWS) == len(EDGES)
    page = (DOCS / "semantics.md").read_text()
    for section in {edge.section for edge in EDGES}:
        assert page.count(f"```{{edges}} {section}\n") == 1


def test_relax_grad_agrees_with_the_page():
    measured = MEASURED["about"]["tvm"]
    if tvm.__version__.split(".")[:2] != measured.split(".")[:2]:
        pytest.skip(f"forward operators are TVM's; the page was measured with TVM {measured}")
    values = dict(zip(ROWS, measure_edges.of_relax_grad(EDGES), strict=True))
    assert wrong(values, "relax_grad") == {}


def test_pytorch_agrees_with_the_page(torch):
    assert wrong({edge.call: measure_edges.of_torch(edge) for edge in EDGES}, "torch") == {}


@pytest.mark.slow
def test_jax_agrees_with_the_page():
    jax = pytest.importorskip("jax", reason="JAX is not installed; the page has its results")
    if jax.__version__ != MEASURED["about"]["jax"]:
        pytest.skip(f"the page was measured with JAX {MEASURED['about']['jax']}")
    assert wrong({edge.call: measure_edges.of_jax(edge) for edge in EDGES}, "jax") == {}


def test_differences_from_pytorch_have_a_reason():
    different = {
        call for call, row in ROWS.items() if row["torch"] not in (None, row["relax_grad"])
    }
    assert different == set(edges.REASONS)
