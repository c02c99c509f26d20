"""Plans of pooling, as values."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest
from machines import cpu_of
from tvm import tirx

from relax_grad.cpu.kernel.reduction.pool_geometry import Pool, Windows, pool_of
from relax_grad.cpu.kernel.reduction.pool_plan import pool_plan
from relax_grad.cpu.tuning import AVX2, GENERIC, NEON, ROWS, ZEN4

#: The first pooling of a ResNet, and one with a remainder of every kind of vectors.
FIRST = Pool(512, (Windows(112, 3, 2, 1, 56, 1),), Windows(112, 3, 2, 1, 56, 1))
ODD = Pool(1, (Windows(19, 3, 2, 1, 10, 1),), Windows(37, 3, 2, 1, 19, 1))


def test_planes_are_divided_into_tasks():
    assert [pool_plan(FIRST, cpu_of(ZEN4, cores)).tasks for cores in (1, 2, 64)] == [16, 32, 512]
    assert pool_plan(ODD, cpu_of(ZEN4)).tasks == 1
    symbolic = replace(FIRST, planes=tirx.Var("n", "int32"))
    assert pool_plan(symbolic, cpu_of(ZEN4, 3)).tasks == 48


@pytest.mark.parametrize(
    ("row", "band"),
    [(GENERIC, (12, 5)), (NEON, (12, 5)), (AVX2, (10, 6)), (ZEN4, (10, 6))],
    ids=["generic", "NEON", "AVX2", "Zen 4"],
)
def test_bands_stay_in_the_cache(row, band):
    plan = pool_plan(FIRST, cpu_of(row))
    assert (plan.band, plan.bands) == band
    assert plan.copied.heights == (2 * plan.band + 1,)
    assert 4 * 113 * plan.copied.heights[0] <= 12 * 1024
    assert pool_plan(ODD, cpu_of(row)).bands == 1


def test_overlapping_windows_have_one_band():
    """Bands of a few windows would copy most of their rows again."""
    axis = Windows(300, 9, 1, 4, 300, 4)
    assert pool_plan(Pool(1, (axis,), axis), cpu_of(ZEN4)).bands == 1


def test_a_copy_has_phases_of_whole_vectors():
    for row, width in ((GENERIC, 24), (AVX2, 32), (ZEN4, 48)):
        copied = pool_plan(ODD, cpu_of(row)).copied
        # The first column of phase 0 is padding, so that column 1 of it is aligned.
        assert copied.starts == (row.lanes - 1, 0)
        assert (copied.width, copied.row) == (width, 2 * width)
        assert copied.size == 21 * copied.row


def test_values_of_windows_have_a_margin():
    gathered = pool_plan(ODD, cpu_of(AVX2)).gathered
    assert (gathered.firsts, gathered.heights) == ((0,), (11,))
    assert (gathered.left, gathered.width) == (0, 32)
    sliding = Windows(16, 5, 1, 4, 20, 4)
    gathered = pool_plan(Pool(1, (sliding,), sliding), cpu_of(AVX2)).gathered
    assert (gathered.firsts, gathered.left) == ((0,), 0)


def test_poolings_without_a_kernel():
    axis = Windows(12, 3, 2, 1, 6, 1)
    assert pool_of(2, 3, [axis, axis]) == Pool(6, (axis,), axis)
    assert pool_of(2, 3, [replace(axis, stride=5), axis]) is None
    assert pool_of(2, 3, [replace(axis, size=8), replace(axis, size=8)]) is None
    assert pool_of(2, 3, [replace(axis, extent=2048), replace(axis, extent=2048)]) is None
    assert pool_of(2, 3, [replace(axis, before=9), axis]) is None
    # Channels become the rows of a plane.
    line = pool_of(2, 34, [axis])
    assert (line.planes, line.outer) == (34, (Windows(2, 1, 1, 0, 2),))


def test_plans_are_frozen_values():
    first, second = (pool_plan(FIRST, cpu_of(ZEN4)) for _ in range(2))
    assert first == second
    with pytest.raises(FrozenInstanceError):
        first.band = 4


def test_plans_as_text():
    assert str(pool_plan(FIRST, cpu_of(ZEN4))).splitlines() == [
        "tasks:    32, for 512 planes",
        "band:     10 of 56 windows along the first axis",
        "copy:     3360 elements of a band, in 2 phases of columns",
        "gradient: 4560 values of windows, stored past the caches if large",
    ]
    symbolic = replace(ODD, planes=tirx.Var("n", "int32"))
    for row in ROWS:
        assert "for symbolic planes" in str(pool_plan(symbolic, cpu_of(row)))
