"""Kernels in bfloat16 beside float32, in relax_grad and in PyTorch."""

from __future__ import annotations

import dataclasses
import json

import pytest

pytest.importorskip("torch", reason="the extra 'bench' is missing: no torch")

import _halves
import frameworks
from rows.products import product


def test_all_rows_exist():
    assert [row.name for row in _halves.rows()] == list(_halves.KERNELS)
    assert len(_halves.rows("attention")) == 3


def test_columns_of_a_product(monkeypatch, tmp_path):
    row = product(24, 40, 64, False, True)
    runs = _halves.contestants(row, compiled=False)
    assert list(runs) == ["relax_grad", "PyTorch", "relax_grad, bfloat16", "PyTorch, bfloat16"]
    assert str(runs["relax_grad, bfloat16"]().dtype) == "bfloat16"
    assert str(runs["PyTorch, bfloat16"]().dtype) == "torch.bfloat16"
    monkeypatch.setattr(_halves, "contestants", lambda _: runs)
    monkeypatch.setattr(_halves, "KERNELS", (row.name,))
    options = ["--repeats", "2", "--seconds", "1", "--out", str(tmp_path / "half_steps.json")]
    args = frameworks._parser().parse_args(["--precision", *options])
    frameworks._measure_kernels([row], args, {"threads": 2})
    (written,) = json.loads((tmp_path / "half_kernels.json").read_text())["rows"]
    assert written["kernel"] == row.name
    assert list(written["ms"]) == list(frameworks.IN_BOTH)
    assert written["ms"]["torch.compile, bfloat16"] is None
    assert all(written["ms"][name] > 0 for name in runs)


def test_different_results_are_an_error():
    row = product(8, 8, 8, False, False)
    wrong = dataclasses.replace(row, torch=lambda a, b: a @ b + 5)
    with pytest.raises(SystemExit, match="results differ by"):
        _halves.contestants(wrong, compiled=False)
