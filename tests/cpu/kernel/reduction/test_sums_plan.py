"""Plans of sums over rows, as values."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
from machines import cpu_of
from tvm import tirx

from relax_grad.cpu.kernel.reduction.sums_plan import column_sums_plan
from relax_grad.cpu.tuning import AVX2, GENERIC, NEON, ROWS, ZEN4


@pytest.mark.parametrize(
    ("row", "vectors"),
    [(GENERIC, 438), (NEON, 438), (AVX2, 219), (ZEN4, 110)],
    ids=["generic", "NEON", "AVX2", "Zen 4"],
)
def test_sums_are_in_registers_or_in_the_cache(row, vectors):
    cpu = cpu_of(row)
    few, many = (column_sums_plan((1, 512, columns), cpu) for columns in (8 * row.lanes, 5250))
    assert (few.in_registers, few.vectors, few.blocks) == (True, 8, 1)
    assert not column_sums_plan((1, 512, 8 * row.lanes + 1), cpu).in_registers
    # 5250 columns are 3 blocks of at most 2048.
    assert (many.in_registers, many.vectors, many.blocks) == (False, vectors, 3)


def test_columns_with_a_remainder():
    plan = column_sums_plan((1, 512, 70), cpu_of(ZEN4))
    assert (plan.vectors, plan.width, plan.blocks, plan.last) == (5, 80, 1, 70)
    plan = column_sums_plan((1, 20, 300), cpu_of(ZEN4))
    # Fewer rows than a stretch are read in registers, in blocks of 8 vectors.
    assert (plan.in_registers, plan.width, plan.blocks, plan.last) == (True, 128, 3, 44)


def test_stretches_are_tasks_if_there_are_few_others():
    cpu = cpu_of(ZEN4)
    assert column_sums_plan((1, 64, 70), cpu).stretches == 2
    assert column_sums_plan((1, 20, 70), cpu).stretches == 1
    assert column_sums_plan((4, 512, 70), cpu).stretches == 1
    n = tirx.Var("n", "int32")
    assert column_sums_plan((1, n, 70), cpu).stretches == 8
    assert column_sums_plan((n, 512, 70), cpu).stretches == 8
    # With many cores, blocks are halved until each core has a task.
    plan = column_sums_plan((1, 20, 300), cpu_of(ZEN4, 9))
    assert (plan.vectors, plan.tasks) == (2, 10)


def test_rows_of_several_operands_are_added_one_by_one():
    cpu = cpu_of(AVX2)
    rows = {
        (columns, operands): column_sums_plan((1, 512, columns), cpu, operands).rows_at_once
        for columns in (768, 3072)
        for operands in (1, 2)
    }
    assert rows == {(768, 1): 8, (768, 2): 1, (3072, 1): 8, (3072, 2): 8}


def test_plans_are_frozen_values():
    first, second = (column_sums_plan((1, 512, 70), cpu_of(ZEN4)) for _ in range(2))
    assert first == second
    with pytest.raises(FrozenInstanceError):
        first.vectors = 4


def test_plans_as_text():
    assert str(column_sums_plan((1, 512, 768), cpu_of(ZEN4))).splitlines() == [
        "sums:  over 512 rows of 1 x 768 columns, in a cache, 8 rows at once",
        "block: 48 vectors of columns, 768 columns in the last block",
        "tasks: 1 x 8 stretches of rows x 1 blocks",
    ]
    n = tirx.Var("n", "int32")
    for row in ROWS:
        assert "over symbolic rows" in str(column_sums_plan((2, n, 70), cpu_of(row)))
