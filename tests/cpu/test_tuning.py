"""The rows of processors: values that fit the machine, and a new row that needs no other change."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from relax_grad.cpu import target as targets
from relax_grad.cpu.dispatch._identity import key_of, text_of
from relax_grad.cpu.kernel.matmul.matmul import Matmul
from relax_grad.cpu.kernel.matmul.plan import plan
from relax_grad.cpu.target import CPU
from relax_grad.cpu.tuning import AVX2, GENERIC, NEON, ROWS, ZEN4, Tuning


def tiles_of(row: Tuning) -> list[tuple[int, int]]:
    """Return the rows and vectors of all tiles of a row."""
    tiles = [row.tiles.largest, row.tiles.wide, row.tiles.widest, row.convolutions.tile]
    tiles += [row.attention.largest, row.attention.wide]
    tiles += [(height, 1) for height in row.tiles.single or ()]
    return [tile for tile in tiles if tile is not None]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_tiles_fit_in_the_registers(row):
    """The sums, a vector of B for each column, and an element of A."""
    for rows, vectors in tiles_of(row):
        assert rows * vectors + vectors + 1 <= row.registers


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_cache_sizes_are_ordered(row):
    """A panel stays in a first-level cache of 32 KB, and a task in a second-level one."""
    for _, vectors in tiles_of(row):
        depth = row.tiles.wide_depth if vectors == 3 else row.tiles.depth
        if (row.lanes, vectors) == (16, 4):
            continue  # products of four vectors are few, or have few steps
        assert 4 * depth * vectors * row.lanes <= 48 * 1024
    assert row.caches.task < row.caches.factor


def test_every_row_names_its_machines():
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert all(row.measured for row in ROWS)
    assert ROWS[-1].features == ()  # every target has a row


def test_the_row_of_a_cpu_without_a_target():
    rows = [CPU(*sizes, 2).tuning for sizes in ((16, 32), (8, 16), (4, 32), (4, 16))]
    assert rows == [ZEN4, AVX2, NEON, GENERIC]


def test_a_tuning_has_the_vectors_of_its_cpu():
    odd = CPU(8, 32, 2).tuning
    assert (odd.lanes, odd.registers) == (8, 32)
    message = "tuning must be of 8 lanes and 16 registers, but it is of 16 and 32; pass another row"
    with pytest.raises(ValueError, match=message):
        CPU(8, 16, 2, tuning=ZEN4)


def test_every_field_is_documented():
    """With its unit, in the docstring of its subject."""
    for subject in fields(Tuning):
        value = getattr(GENERIC, subject.name)
        if hasattr(value, "__dataclass_fields__"):
            for each in fields(value):
                assert each.name in type(value).__doc__, (subject.name, each.name)


def test_a_new_processor_is_a_row(monkeypatch):
    """Its features recognise it, and kernels take its values."""
    row = replace(
        AVX2,
        name="Zen 3",
        features=(*AVX2.features, "vpclmulqdq"),
        tiles=replace(AVX2.tiles, largest=(4, 3)),
    )
    monkeypatch.setattr(targets, "ROWS", (row, AVX2, GENERIC))
    zen2, zen3 = (
        CPU.of({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": name, "num-cores": 2})
        for name in ("znver2", "znver3")
    )
    assert (zen2.tuning, zen3.tuning) == (AVX2, row)
    sizes = [plan(Matmul(240, 240, 240), cpu).packed for cpu in (zen2, zen3)]
    assert [(own.height, own.vectors) for own in sizes] == [(6, 2), (4, 3)]


def test_kernels_of_two_rows_have_different_keys():
    """They are kept on disk under a text that is the same in every process."""
    rows = [*ROWS, replace(ZEN4, tasks=replace(ZEN4.tasks, gain=1.07))]
    texts = {text_of(key_of(CPU(row.lanes, row.registers, 2, tuning=row))) for row in rows}
    assert None not in texts
    assert len(texts) == len(rows)
    again = replace(ZEN4, tasks=replace(ZEN4.tasks, gain=1.08))
    assert text_of(key_of(again)) == text_of(key_of(ZEN4))
