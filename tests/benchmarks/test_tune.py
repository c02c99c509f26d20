"""The program that measures the values of a processor's row, without measurements."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="the extra 'bench' is missing: no torch")

import tune

from relax_grad.cpu import target as targets
from relax_grad.cpu.limits import KB, MB
from relax_grad.cpu.target import CPU
from relax_grad.cpu.tuning import ROWS, ZEN4


class Timed:
    """Kernels whose time is a function of the row, for each measurement in turn."""

    def __init__(self, time_of):
        self.row, self._time_of = ZEN4, time_of

    def ratio(self, row, other, names, repeats):
        assert names
        return self._time_of(other) / self._time_of(row)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_candidates_are_rows(row):
    """Tiles fit in the registers, and each candidate makes another row."""
    for value in tune.VALUES:
        others = value.others(row)
        assert others
        for other in others:
            changed = value.set_in(row, other)
            assert value.of(changed) == other
            assert changed != row
            if isinstance(other, tuple):
                rows, vectors = other
                assert rows * vectors + vectors + 1 <= row.registers


def test_kernels_are_rows_of_the_benchmark():
    names = {row.name for row in tune.ROWS}
    assert {name for value in tune.VALUES for name in value.kernels} <= names


def values_of(*beginnings) -> list:
    return [value for value in tune.VALUES if str(value).startswith(beginnings)]


def test_faster_values_replace_those_of_the_row():
    """Each value is measured with those found before it: 8 steps are faster only with large
    factors."""

    def time_of(row):
        slow = row.prefetch.steps != 8 or row.caches.factor != 2 * MB
        return (1.0 if row.caches.factor == 2 * MB else 1.5) + slow

    search = tune.Search(Timed(time_of))
    found = [search.measure(value, 1, 0.98) for value in values_of("caches", "prefetch")]
    row = search.row
    assert (row.caches.factor, row.prefetch.steps) == (2 * MB, 8)
    factor = {"now": "1 * MB", "512 * KB": 1.0, "2 * MB": 0.8, "once more": 0.8, "new": "2 * MB"}
    assert found[0] == factor
    made = eval(
        tune.source_of(row, ZEN4, "Zen 4"),
        {"replace": tune.replace, "BASE": ZEN4, "MB": MB, "KB": KB},
    )
    assert made == tune.replace(row, measured="Zen 4")


def test_a_value_that_is_faster_once_stays_out():
    ratios = iter([0.5, 1.0, 1.5])  # two candidates, and the first one once more
    kernels = Timed(None)
    kernels.ratio = lambda *_: next(ratios)
    search = tune.Search(kernels)
    search.measure(values_of("caches.factor")[0], 1, 0.98)
    assert search.row is ZEN4
    assert next(ratios, None) is None


def test_kernels_are_generated_with_a_row():
    target = {"kind": "llvm", "mcpu": "znver4", "num-cores": 2}
    assert CPU.of(target).tuning is ZEN4
    other = values_of("tiles.depth")[0].set_in(ZEN4, 128)
    with tune.in_place_of(ZEN4, other):
        assert CPU.of(target).tuning is other
    assert CPU.of(target).tuning is ZEN4
    assert targets.ROWS is ROWS
