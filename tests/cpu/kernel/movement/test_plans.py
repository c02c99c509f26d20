"""Plans of copies and scatter-adds, as values."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
from machines import cpu_of
from tvm import tirx

from relax_grad.cpu.kernel.movement._plans import copy_plan, scatter_plan
from relax_grad.cpu.tuning import AVX2, NEON, ROWS, ZEN4

N = tirx.Var("n", "int32")


def copies(*shapes, axis=1, size=4, cores=2):
    return copy_plan(axis, shapes, size, cpu_of(ZEN4, cores))


def test_a_copy_of_many_rows_has_a_task_for_each():
    plan = copies((99, 5, 70), (99, 1, 70), (99, 6, 70))
    assert (plan.outer, plan.row, plan.lengths) == (99, 420, (350, 70))
    assert (plan.shares, plan.in_one_thread) == (1, False)
    assert copies((N, 5), (N, 1), (N, 6)).shares == 1


def test_few_long_rows_are_shared():
    plan = copies((1, 50_000), (1, 7), (1, 50_007))
    assert (plan.shares, plan.in_one_thread) == (8, False)
    # Shares begin at cache lines.
    assert (plan.line, plan.step(50_000), plan.step(7)) == (16, 6256, 16)
    assert copies((1, 50_000), (1, 50_000), size=1).shares == 3
    assert copies((1, N), (1, N)).shares == 8
    assert copies((1, 50_000), (1, 50_000), cores=16).shares == 12


def test_one_thread_copies_few_bytes():
    assert copies((3, 5), (3, 9), (3, 14)).in_one_thread
    assert not copies((2, 16384), (2, 16384)).in_one_thread
    assert not copies((N, 5), (N, 5)).in_one_thread


def test_scatter_adds_share_columns_and_rows():
    plan = scatter_plan(1, 1000, 768, cpu_of(ZEN4))
    assert (plan.parts, plan.width, plan.last, plan.shares) == (2, 384, 384, 1)
    odd = scatter_plan(1, 1000, 300, cpu_of(AVX2))
    assert (odd.parts, odd.width, odd.last, odd.shares) == (2, 152, 148, 1)
    # Short rows are not divided: tasks share the rows of the result.
    short = scatter_plan(1, 1000, 21, cpu_of(NEON, 8))
    assert (short.parts, short.shares, short.share) == (1, 8, 125)
    assert scatter_plan(1, 3, 21, cpu_of(NEON, 8)).shares == 3
    assert scatter_plan(N, 3, 21, cpu_of(NEON, 8)).shares == 1
    assert [scatter_plan(1, 9, 1, cpu_of(ZEN4, cores)).clears for cores in (1, 8)] == [4, 32]


def test_plans_are_frozen_values():
    for make in (lambda: copies((3, 5), (3, 5)), lambda: scatter_plan(1, 9, 70, cpu_of(ZEN4))):
        assert make() == make()
        with pytest.raises(FrozenInstanceError):
            make().shares = 4


def test_plans_as_text():
    assert str(copies((1, 50_000), (1, 7), (1, 50_007))).splitlines() == [
        "copies:  1 rows of 50007 elements in 2 parts",
        "tasks:   1 x 8 shares of a row",
        "threads: all",
    ]
    assert str(scatter_plan(1, 1000, 300, cpu_of(AVX2))).splitlines() == [
        "result:  1 x 1000 rows of 300, set to 0 by 8 tasks",
        "columns: 2 ranges of 152, the last one of 148",
        "tasks:   1 x 2 ranges of columns x 1 of rows",
    ]
    for row in ROWS:
        assert "symbolic" in str(scatter_plan(N, 9, 70, cpu_of(row)))
