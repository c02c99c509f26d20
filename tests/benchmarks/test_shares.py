"""The shares of products and attention in training steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the extra 'bench' is missing: no torch")

import shares

MEASURED = Path(__file__).parents[2] / "docs/_measured/shares.json"


def test_shares_of_the_own_times_of_operators():
    times = {
        "aten::mm": 40.0,
        "aten::addmm": 20.0,
        "aten::mul": 15.0,
        "aten::_scaled_dot_product_flash_attention_for_cpu": 10.0,
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward": 15.0,
    }
    assert shares.shares(times) == {"products": 60, "attention": 25}


def test_the_page_has_the_shares_of_each_step():
    measured = json.loads(MEASURED.read_text("utf-8"))
    assert set(measured) - {"about", "unit"} == set(shares.STEPS)
    for step in shares.STEPS:
        assert 0 < sum(measured[step].values()) < 100
