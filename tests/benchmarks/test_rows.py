"""The rows of the benchmarks: data in the right form, and the same computation for each
contestant."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest
from tvm import relax

pytest.importorskip("torch", reason="the extra 'bench' is missing: no torch")

import torch
from _contestants import contestants, difference
from rows import ROWS, attentions
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

BY_NAME = {row.name: row for row in ROWS}


class Zeros:
    """A stand-in for a random generator. Its arrays take neither time nor memory."""

    def standard_normal(self, shape, dtype):
        return np.zeros(shape, dtype)

    def random(self, shape, dtype):
        return np.zeros(shape, dtype)

    def integers(self, _low, _high, shape):
        return np.zeros(shape, "int64")


def test_each_row_has_a_name_of_its_own_and_a_group():
    names = Counter(row.name for row in ROWS)
    assert [name for name, count in names.items() if count > 1] == []
    assert {row.group for row in ROWS} == {"conv", "matmul", "memory", "symbolic"}


def test_each_row_is_a_module(monkeypatch):
    monkeypatch.setattr(np.random, "default_rng", lambda _seed: Zeros())
    for row in ROWS:
        if "50257" in row.name:
            continue  # deriving data from so large an array takes seconds
        arrays = row.arrays()
        module = row.module(arrays)
        assert relax.analysis.check_well_formed(module), row.name
        assert len(module["main"].params) == len(arrays), row.name
        assert set(row.symbolic) <= set(range(len(arrays))), row.name
        assert bool(relax.analysis.free_symbolic_vars(module["main"])) is False, row.name


def test_the_operations_are_those_that_pytorch_counts():
    """By its counter, without arithmetic. It multiplies those of weight gradients by the groups."""
    counted = [row for row in ROWS if row.flops]
    assert len(counted) > 120
    with FakeTensorMode(allow_non_fake_inputs=True):
        for row in counted:
            inputs = [torch.empty(shape) for shape in row.inputs]
            with FlopCounterMode(display=False) as counter:
                row.torch(*inputs)
            is_multiplied = "weight gradient" in row.name and re.search(
                "depthwise|groups", row.name
            )
            if not is_multiplied:
                assert row.flops == counter.get_total_flops(), row.name


@pytest.mark.parametrize(
    "name",
    [
        "weight gradient 8x576x14² -> 576, 3x3, stride 2, depthwise",
        "cross-entropy and gradient 64x10",
        "rms_norm and gradients 4x256x768",
        "max_pool2d, gradient 64x32x32², 2x2, stride 2",
        "mean of planes 8x512x7²",
        "momentum SGD update in place 4096x1024",
        "symbolic batch: layer_norm 4x256x768",
    ],
)
def test_contestants_agree(name):
    by_name = contestants(BY_NAME[name], ["relax_grad", "torch"])
    assert ("static" in by_name) == name.startswith("symbolic")
    for contestant in by_name.values():
        assert difference(contestant.results, by_name["torch"].results) < 1e-5
        contestant.run()


def test_attention_with_dropout_of_no_weight_agrees():
    for row in attentions.rows((1, 20, 2, 8), True, rate=0.0):
        by_name = contestants(row, ["relax_grad", "torch"])
        assert difference(by_name["relax_grad"].results, by_name["torch"].results) < 1e-5


def test_dropped_weights_are_a_share_of_all():
    sizes = 2, 128, 4, 16
    plain, dropped = (attentions.rows(sizes, False, rate=rate)[0] for rate in (None, 0.25))
    assert dropped.is_random
    wanted = contestants(plain, ["torch"])["torch"].results[0]
    # The variance of a sum of kept values is 1 / (1 - rate) of that of all.
    for contestant in contestants(dropped, ["relax_grad", "torch"]).values():
        ratio = np.square(contestant.results[0]).mean() / np.square(wanted).mean()
        assert 1.2 < ratio < 1.5


def test_differences_are_relative_to_the_largest_element_of_each_result():
    wanted = [np.array([100.0, 0.0]), np.array([0.01])]
    assert difference([np.array([100.0, 1.0]), np.array([0.01])], wanted) == pytest.approx(0.01)
    assert difference([np.array([100.0, 0.0]), np.array([0.02])], wanted) == pytest.approx(1.0)
    assert difference([np.array([np.nan, 0.0]), np.array([0.01])], wanted) == np.inf
    assert difference([np.zeros(3), np.zeros(1)], wanted) == np.inf
