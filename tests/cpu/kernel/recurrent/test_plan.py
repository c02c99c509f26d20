"""Plans of recurrent layers and their gradients, as values."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest
from machines import cpu_of
from tvm import tirx

from relax_grad.cpu.kernel.recurrent.layer import Layer
from relax_grad.cpu.kernel.recurrent.plan import Factors, recurrent_plan, tile
from relax_grad.cpu.tuning import AVX2, GENERIC, ICE_LAKE, NEON, ROWS, ZEN4

LSTM, RESET = Layer("lstm", 35, 20, 300), Layer("gru_reset", 35, 20, 300)


@pytest.mark.parametrize("cores", [1, 2, 64])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_tiles_fit_in_the_registers(row, cores):
    cpu = cpu_of(row, cores)
    for batch in (1, 8, 16, 33, 100):
        for size in (3, 128, 256, 1024):
            plan = recurrent_plan(replace(LSTM, batch=batch, size=size), cpu)
            (height, vectors), most = plan.weights[0].tile, 32
            assert height <= plan.rows <= most
            assert height * vectors + vectors + 1 <= cpu.registers


@pytest.mark.parametrize(
    ("row", "size", "best"),
    [
        (GENERIC, (12, 128), (6, 2)),
        (NEON, (16, 1024), (8, 2)),
        # Sixteen rows are four tiles of four, not three of six.
        (AVX2, (16, 1024), (4, 3)),
        (AVX2, (12, 128), (6, 2)),
        (ZEN4, (16, 1024), (8, 2)),
    ],
)
def test_tiles_waste_few_rows(row, size, best):
    assert tile(*size, cpu_of(row)) == best


def test_tasks_are_equal_shares_of_the_sequences():
    cpu = cpu_of(ZEN4)
    sizes = {batch: recurrent_plan(replace(LSTM, batch=batch), cpu) for batch in (1, 2, 33, 65)}
    assert {batch: (plan.rows, plan.tasks) for batch, plan in sizes.items()} == {
        1: (1, 1),
        2: (1, 2),
        33: (17, 2),
        65: (17, 4),
    }
    n = replace(LSTM, batch=tirx.Var("n", "int32"))
    assert [recurrent_plan(n, cpu_of(row)).rows for row in (ZEN4, NEON, AVX2)] == [16, 16, 12]
    assert "symbolic of 16 sequences" in str(recurrent_plan(n, cpu))


def test_long_sums_are_divided_if_several_strips_read_a_panel():
    (weight,) = recurrent_plan(LSTM, cpu_of(AVX2)).weights
    assert (weight.columns, weight.steps, weight.stretch) == (1200, 300, 256)
    assert not weight.is_at_once
    (single,) = recurrent_plan(replace(LSTM, batch=1), cpu_of(AVX2)).weights
    assert (single.stretch, single.is_at_once) == (300, True)


def test_a_tile_that_takes_all_registers_is_rolled():
    """Three vectors of four rows, of a panel, and of an element are 16 registers."""
    cases = {(AVX2, 32): (3, True), (AVX2, 20): (2, False), (ZEN4, 32): (3, False)}
    for (row, batch), wanted in cases.items():
        (weight,) = recurrent_plan(replace(LSTM, batch=batch), cpu_of(row)).weights
        assert (weight.tile[1], weight.is_rolled) == wanted


def test_a_gru_that_resets_first_has_two_products():
    forward = recurrent_plan(RESET, cpu_of(ZEN4)).weights
    backward = recurrent_plan(RESET, cpu_of(ZEN4), is_turned=False).weights
    for weights, sizes in ((forward, (600, 300)), (backward, (300, 600))):
        assert [(own.columns, own.depth) for own in weights] == [sizes, (300, 300)]
        assert [own.start for own in weights] == [0, 600 * 300]


def test_halves_are_multiplied_in_pairs_or_tiles():
    cpu = cpu_of(ICE_LAKE, tiles=True, bfloat16=True)
    plans = [recurrent_plan(replace(LSTM, size=19), cpu, factors) for factors in Factors]
    assert [plan.weights[0].steps for plan in plans] == [19, 10, 16]
    assert [plan.weights[0].tile for plan in plans] == [(5, 2), (5, 2), (10, 2)]
    # An odd number of cache lines of pairs, or of whole tiles.
    assert [factors.pitch(33) for factors in Factors] == [48, 48, 96]


def test_plans_are_frozen_values():
    first, second = (recurrent_plan(LSTM, cpu_of(ZEN4)) for _ in range(2))
    assert first == second
    with pytest.raises(FrozenInstanceError):
        first.rows = 4


def test_plans_as_text():
    assert str(recurrent_plan(RESET, cpu_of(AVX2))).splitlines() == [
        "layer:     gru_reset, 35 steps of 20 sequences, 300 units",
        "elements:  one at a time",
        "tasks:     2 of 10 sequences",
        "weight:    600 columns in tiles of 5 rows x 2 vectors, 300 steps, 256 of them at once",
        "last gate: 300 columns in tiles of 5 rows x 2 vectors, 300 steps, 256 of them at once",
    ]
