"""The measurement of attention as one operator beside attention that is written out."""

from __future__ import annotations

from argparse import Namespace

import pytest

pytest.importorskip("torch", reason="the extra 'bench' is missing: no torch")

import written_out


def test_a_row_has_both_forms(monkeypatch):
    monkeypatch.setenv("TVM_NUM_THREADS", "1")
    args = Namespace(vectors=None, repeats=1, seconds=1.0)
    row = written_out.measured(((2, 2, 5, 7, 3), True, True), args)
    assert row["is_fused"]
    assert all(time > 0 for time in row["us"] + row["written_out_us"] + row["median"])
