"""Gradients of random programs of tensor functions agree with central differences, or are
refused."""

from __future__ import annotations

import math

import pytest
from sweep import SHARE

from relax_grad.testing.fuzz.tir.programs import draw

from ._random_gradients import Result, check, in_float64


def _check(seed: int, numbers) -> list[Result]:
    results = check([in_float64(draw(seed, number)) for number in numbers], "default")
    for number, result in zip(numbers, results, strict=True):
        # A refusal names the binding, and the block or the tensor.
        is_named = "binding '" in result.refusal or "overwrites in place" in result.refusal
        assert not result.refusal or is_named, (number, result.refusal)
    return results


def _summary(results: list[Result]) -> tuple[int, int, int]:
    return (
        sum(result.compared for result in results),
        sum(result.skipped for result in results),
        sum(result.miscompiled for result in results),
    )


def test_gradients():
    compared, skipped, miscompiled = _summary(_check(7, range(40)))
    assert compared >= 30
    assert skipped < compared
    assert miscompiled <= 4


@pytest.mark.slow
@pytest.mark.parametrize("seed", [7, 8, 10, 11])
def test_more_gradients(seed):
    results = []
    # The shares below are those of at least 40 programs.
    for start in range(0, max(40, math.ceil(200 * SHARE)), 20):
        results += _check(seed, range(start, start + 20))
    compared, skipped, miscompiled = _summary(results)
    assert compared >= len(results) / 2
    assert skipped < compared
    assert miscompiled <= len(results) / 20
