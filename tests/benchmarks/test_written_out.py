"""The measurement of attention as one operator beside the form that is written out."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="the extra 'bench' is missing: no torch")
pytest.importorskip("rich", reason="the extra 'bench' is missing: no rich")

import _written_out
from _written_out import rows, summary

import relax_grad


def test_rows_have_both_forms():
    sizes = 2, 2, 5, 7, 3
    measured = rows(relax_grad.target.host(), 1, [sizes])
    assert [(row["causal"], row["permuted"]) for row in measured] == _written_out.FORMS
    for row in measured:
        assert row["sizes"] == list(sizes)
        assert row["is_fused"]
        assert all(time > 0 for time in row["us"] + row["written_out_us"] + row["median"])


def test_the_summary_counts_losses():
    row = {"sizes": [1, 2, 3, 3, 4], "causal": False, "permuted": False, "median": [0.9, 1.0]}
    lost = {**row, "causal": True, "median": [1.2, 1.04]}
    text = summary([row, lost])
    assert "forward: 1 of 2 rows above 1.05; at most 1.20" in text
    assert "[1, 2, 3, 3, 4], causal\n" in text
    assert "gradients: 0 of 2 rows above 1.05; at most 1.04" in text
