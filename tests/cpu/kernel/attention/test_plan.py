"""Plans of attention, as values."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
from machines import cpu_of
from tvm import tirx

from relax_grad.cpu.kernel.attention.plan import attention_plan
from relax_grad.cpu.kernel.attention.sizes import Attention
from relax_grad.cpu.tuning import AVX2, ICE_LAKE, ROWS, ZEN4


def attention(queries=128, keys=1000, features=64, mask=None) -> Attention:
    return Attention(2, queries, keys, 8, 8, features, features, 0.125, causal_mask=mask)


def test_blocks_are_whole_tiles():
    own = attention_plan(attention(), cpu_of(ZEN4))
    assert (own.tile_rows, own.tile_vectors, own.width) == (8, 2, 32)
    assert (own.rows, own.columns) == (64, 128)
    # Ten tiles of 6 rows have an even number of rows.
    short = attention_plan(attention(), cpu_of(AVX2))
    assert (short.tile_rows, short.tile_vectors, short.rows) == (6, 2, 60)


def test_one_block_has_few_keys():
    own = attention_plan(attention(keys=200), cpu_of(ZEN4))
    assert (own.panels, own.columns, own.pitch) == (7, 224, 240)
    assert attention_plan(attention(keys=16), cpu_of(ZEN4)).tile_vectors == 1


def test_one_block_of_queries():
    cpu, n = cpu_of(ZEN4), tirx.Var("n", "int32")
    assert attention_plan(attention(64, 300), cpu).has_one_block_of_queries
    assert not attention_plan(attention(65, 300), cpu).has_one_block_of_queries
    assert not attention_plan(attention(n, 300), cpu).has_one_block_of_queries
    # Under a causal mask, the last keys would have no query.
    assert not attention_plan(attention(64, 300, mask="TopLeft"), cpu).has_one_block_of_queries
    assert attention_plan(attention(64, 64, mask="TopLeft"), cpu).has_one_block_of_queries


def test_halves_are_multiplied_in_pairs_or_tiles():
    cpu = cpu_of(ICE_LAKE, tiles=True, bfloat16=True)
    plain, pairs, tiles = (
        attention_plan(attention(), cpu, of) for of in ("plain", "pairs", "tiles")
    )
    assert [own.step for own in (plain, pairs, tiles)] == [1, 2, 2]
    assert [own.depth_of(33) for own in (plain, pairs, tiles)] == [33, 17, 32]
    assert (tiles.tile_rows, tiles.key_rows, tiles.tile_vectors, tiles.rows) == (32, 32, 2, 64)
    assert (pairs.spare, tiles.spare) == (0, 32)


def test_plans_are_frozen_values():
    first, second = (attention_plan(attention(), cpu_of(ZEN4)) for _ in range(2))
    assert first == second
    with pytest.raises(FrozenInstanceError):
        first.elements = "pairs"


def test_plans_as_text():
    own = attention_plan(attention(), cpu_of(ICE_LAKE))
    assert str(own).splitlines() == [
        "elements: one at a time",
        "tile:     8 queries or 8 keys x 2 vectors",
        "block:    64 of 128 queries x 128 of 1000 keys",
        "prefetch: 4 steps ahead",
    ]
    n = tirx.Var("n", "int32")
    for row in ROWS:
        assert "symbolic keys" in str(attention_plan(attention(keys=n), cpu_of(row)))
