"""Plans of softmax, as values."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
from machines import cpu_of
from tvm import tirx

from relax_grad.cpu.kernel.reduction.lines import Lines, lines_plan
from relax_grad.cpu.tuning import AVX2, GENERIC, NEON, ROWS, ZEN4

N = tirx.Var("n", "int32")


def test_lines_of_a_tensor():
    assert Lines.along([8, 21, 65], 1) == Lines(8, 21, 65)
    assert Lines.along([8, 21, 65], -1) == Lines(168, 65, 1)
    assert Lines.along([8], 0) == Lines(1, 8, 1)
    # Most lanes would be unused.
    assert Lines.along([8, 21, 3], 1) is None
    assert Lines.along([8, 21, 4], 1) == Lines(8, 21, 4)


def test_a_task_has_a_row():
    plan = lines_plan(Lines(1, 1000, 1), cpu_of(ZEN4))
    assert (plan.of.are_rows, plan.vectors) == (True, 0)
    assert str(plan).splitlines() == ["lines: 1 rows of 1000", "tasks: 1, a row each"]


@pytest.mark.parametrize(
    ("row", "width"), [(GENERIC, 16), (NEON, 16), (AVX2, 32), (ZEN4, 64)], ids=lambda own: str(own)
)
def test_blocks_of_columns(row, width):
    cpu = cpu_of(row)
    plan = lines_plan(Lines(2, 21, 65), cpu)
    assert (plan.vectors, plan.width, plan.last, plan.has_whole_blocks) == (4, width, 1, True)
    assert plan.blocks == -(-65 // width)
    few = lines_plan(Lines(2, 21, 5), cpu)
    assert (few.blocks, few.last, few.has_whole_blocks) == (1, 5, False)
    whole = lines_plan(Lines(2, 21, 128), cpu)
    assert (whole.blocks, whole.last) == (128 // width, 0)
    symbolic = lines_plan(Lines(2, 21, N), cpu)
    assert (symbolic.last, symbolic.has_whole_blocks) == (None, True)


def test_plans_are_frozen_values():
    first, second = (lines_plan(Lines(2, 21, 65), cpu_of(ZEN4)) for _ in range(2))
    assert first == second
    with pytest.raises(FrozenInstanceError):
        first.vectors = 2


def test_plans_as_text():
    assert str(lines_plan(Lines(8, 21, 65), cpu_of(ZEN4))).splitlines() == [
        "lines: 8 x 65 columns of 21",
        "block: 4 vectors of columns; 1 columns are left for single vectors",
        "tasks: 8 x 2 blocks",
    ]
    for row in ROWS:
        assert "tasks: 8 x symbolic blocks" in str(lines_plan(Lines(8, 21, N), cpu_of(row)))
