"""Plans of matrix products, as values."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
from machines import cpu_of
from tvm import tirx

from relax_grad.cpu.kernel.matmul.matmul import Matmul
from relax_grad.cpu.kernel.matmul.plan import plan
from relax_grad.cpu.tuning import AVX2, EARLY_AVX512, ICE_LAKE, NEON, ROWS, ZEN4


@pytest.mark.parametrize(
    ("row", "tile", "stretch", "tasks", "reading"),
    [
        (AVX2, (6, 2), 256, (1, 2), "copied"),
        (ZEN4, (8, 2), 256, (1, 2), "copied"),
        (ICE_LAKE, (9, 3), 192, (1, 2), "copied"),
        (EARLY_AVX512, (9, 3), 256, (1, 2), "copied"),
        (NEON, (8, 3), 256, (1, 2), "copied"),
    ],
    ids=str,
)
def test_a_layer_of_a_transformer(row, tile, stretch, tasks, reading):
    """128 tokens, 3072 inputs and 768 outputs: rows of A share few sets of a cache, and threads
    steal panels."""
    own = plan(Matmul(128, 768, 3072), cpu_of(row))
    assert own.way == "packed"
    assert not own.in_one_thread
    packed = own.packed
    assert (packed.height, packed.vectors, packed.stretch) == (*tile, stretch)
    assert (packed.tasks, packed.reading, packed.parts) == (tasks, reading, 1)
    assert packed.shares.items == packed.panels


def test_the_ways_of_products():
    n, cpu = tirx.Var("n", "int32"), cpu_of(ZEN4)

    def way(*product, **options) -> str:
        return plan(Matmul(*product), cpu, **options).way

    assert way(8, 1024, 1024) == "few rows"
    assert way(64, 1024, 1024) == way(n, 64, 64, True) == way(n, n, 64) == "packed"
    assert way(1024, 10, 128, True) == "turned"
    assert way(1024, 10, 128, True, adds_bias=True) == "packed"
    assert way(n, 64, 64) == "at run time"
    assert way(8, 1024, 1024, way="packed") == "packed"


def test_a_plan_has_the_parts_of_its_way():
    n = tirx.Var("n", "int32")
    for product, parts in [
        (Matmul(8, 1024, 1024), (True, False, False)),
        (Matmul(64, 1024, 1024), (False, True, False)),
        (Matmul(1024, 10, 128, True), (False, False, True)),
        (Matmul(n, 64, 64), (True, True, False)),
    ]:
        for row in (AVX2, ZEN4, ICE_LAKE):
            own = plan(product, cpu_of(row))
            found = (own.in_place, own.packed, own.transposed)
            assert tuple(part is not None for part in found) == parts


def test_tasks_of_symbolic_extents_are_divided_at_run_time():
    own = plan(Matmul(tirx.Var("n", "int32"), 64, 64, True), cpu_of(ZEN4)).packed
    assert own.tasks is own.block is own.prefetches is None
    assert own.height == 8


def test_small_products_have_one_thread():
    own = plan(Matmul(16, 16, 64), cpu_of(ZEN4))
    assert own.in_one_thread
    assert own.cpu.cores == 1


def test_the_factors_of_a_column_change_places():
    own = plan(Matmul(100, 1, 30), cpu_of(ZEN4))
    assert own.swaps
    assert own.product == Matmul(1, 100, 30, True, True)


def test_bfloat16_is_multiplied_in_pairs_where_the_processor_can():
    product, halves = Matmul(64, 256, 515), ("bfloat16", "bfloat16")
    pairs = plan(product, cpu_of(ZEN4, bfloat16=True), dtypes=halves)
    assert pairs.pairs
    assert pairs.packed.product.depth == 258
    assert not plan(product, cpu_of(ZEN4), dtypes=halves).pairs
    assert not plan(product, cpu_of(ZEN4, bfloat16=True), dtypes=("bfloat16", "float32")).pairs


@pytest.mark.parametrize(
    ("product", "tile", "depth", "reading"),
    [
        (Matmul(64, 256, 512), (32, 2), (256, 256), "in place"),
        (Matmul(64, 256, 515), (32, 2), (272, 272), "copied"),
        (Matmul(64, 256, 2051), (32, 2), (1040, 528), "copied"),  # two stretches of whole steps
        (Matmul(64, 256, 512, True), (32, 2), (256, 256), "copied"),
        (Matmul(16, 12, 30), (16, 1), (16, 16), "copied"),
    ],
)
def test_bfloat16_is_multiplied_in_tiles_where_the_processor_has_them(
    product, tile, depth, reading
):
    cpu = cpu_of(ICE_LAKE, tiles=True, bfloat16=True)
    own = plan(product, cpu, way="packed", dtypes=("bfloat16", "bfloat16"))
    assert own.tiles
    assert not own.pairs
    packed = own.packed
    assert (packed.height, packed.vectors) == tile
    assert (packed.product.depth, packed.stretch) == depth
    assert packed.reading == reading
    assert own.lines()["elements"] == "tiles of bfloat16 (AMX)"
    assert not plan(product, cpu, dtypes=("bfloat16", "float32")).tiles


def test_a_first_factor_in_float16_is_copied():
    cpu, product = cpu_of(ZEN4), Matmul(64, 256, 500)
    dtypes = [(name, "float32") for name in ("float32", "float16")]
    assert [plan(product, cpu, dtypes=each).packed.reading for each in dtypes] == [
        "in place",
        "copied",
    ]


def test_rare_tiles_have_short_code():
    own = plan(Matmul(41, 70, 64), cpu_of(ZEN4)).packed
    assert own.round_of(7, 2, is_whole=True) == own.round == 4
    assert own.round_of(6, 1, is_whole=False) == 1


def test_plans_are_frozen_values():
    first, second = (plan(Matmul(128, 768, 3072), cpu_of(ZEN4)) for _ in range(2))
    assert first == second
    with pytest.raises(FrozenInstanceError):
        first.way = "few rows"


def test_a_plan_as_text():
    own = plan(Matmul(128, 768, 3072), cpu_of(ICE_LAKE))
    lines = str(own).splitlines()
    assert len(lines) == len(own.lines())
    assert "tile:           9 rows x 3 vectors, rounds of 4 steps" in lines
    assert "tasks:          1 x 2 blocks; threads steal 16 panels" in lines
    n = tirx.Var("n", "int32")
    for row in ROWS:
        for product in (Matmul(1024, 10, 128, True), Matmul(n, 64, 64), Matmul(9, n, 64, batch=n)):
            assert row.name in str(plan(product, cpu_of(row)))


def test_a_way_that_a_product_does_not_allow():
    with pytest.raises(ValueError, match="does not allow 'turned'"):
        plan(Matmul(1, 64, 64), cpu_of(ZEN4), way="turned")
    with pytest.raises(ValueError, match="with a bias does not allow 'turned'"):
        plan(Matmul(64, 64, 64), cpu_of(ZEN4), way="turned", adds_bias=True)
