"""The figures of kernels and of training steps, and kernels in bfloat16."""

from __future__ import annotations

import dataclasses
from argparse import Namespace

import pytest

pytest.importorskip("torch", reason="the extra 'bench' is missing: no torch")

import half
import speed
import tvm
from _paired import WIDTHS, summary, target_of
from rows import ROWS
from rows.products import product

import relax_grad

ARGS = Namespace(against=[], repeats=1, seconds=1.0)


def test_ratios_are_medians_of_pairs():
    samples = {"relax_grad": [2.0, 1.0, 3.0], "torch": [4.0, 4.0, 4.0], "TVM": [200.0]}
    assert speed.figures("symbolic", "symbolic batch: softmax²", samples) == {
        "group": "symbolic",
        "name": "softmax²",
        "ms": 2000.0,
        "least": 0.25,
        "ratios": {"torch": 0.5, "TVM": 0.01},
    }


def test_the_summary_has_a_line_for_each_group():
    rows = {"a": {"g": "x", "r": 0.5}, "b": {"g": "x", "r": 2.0}, "c": {"g": "y", "r": 0.5}}
    assert summary(rows, lambda row: row["g"], lambda row: row["r"]).splitlines() == [
        "x: 2 rows, mean 1.00, 1 above 1; most 2.00, b",
        "y: 1 rows, mean 0.50, 0 above 1; most 0.50, c",
    ]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Leave out ``torch.compile``, which takes long."""
    monkeypatch.setenv("TVM_NUM_THREADS", "1")
    monkeypatch.delitem(half.COLUMNS, "torch.compile, bfloat16")


def test_a_row_is_measured():
    found = speed.measured(product(24, 40, 64, False, True), ARGS)
    assert set(found) | {"memory_mb", "peak"} == set(speed.UNITS) | {"group", "name"}
    assert found["error"] < 1e-5
    found = half.measured(product(24, 40, 64, False, True), ARGS)
    assert list(found["ms"]) == list(half.COLUMNS)
    assert all(ms > 0 for ms in found["ms"].values())


def test_different_results_in_bfloat16_are_an_error():
    wrong = dataclasses.replace(product(8, 8, 8, False, False), torch=lambda a, b: a @ b + 5)
    with pytest.raises(ValueError, match="results differ by"):
        half.measured(wrong, ARGS)


def test_kernels_in_bfloat16_are_rows():
    assert set(half.KERNELS) <= {row.name for row in ROWS}


@pytest.mark.parametrize(
    ("name", "of_avx2"),
    [
        ("cascadelake", "haswell"),
        ("haswell", "haswell"),
        ("emeraldrapids", "x86-64-v3"),
        ("znver5", "x86-64-v3"),
    ],
)
def test_avx2_is_compiled_for_processors_whose_kernels_suit_this_one(monkeypatch, name, of_avx2):
    host = tvm.target.Target({"kind": "llvm", "mcpu": name})
    monkeypatch.setattr(relax_grad.target, "host", lambda: host)
    assert {width: target_of(width) for width in WIDTHS} == {"host": name, "avx2": of_avx2}
    assert target_of(None) == name
