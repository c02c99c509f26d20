"""Plans of convolutions and their gradients, as values."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest
from machines import cpu_of
from tvm import tirx

from relax_grad.cpu.kernel.conv.geometry import Conv2d, Conv3d, Windows
from relax_grad.cpu.kernel.conv.plan import DATA, FORWARD, WEIGHT, plan, way_of
from relax_grad.cpu.tuning import AVX2, GENERIC, ICE_LAKE, NEON, ROWS, ZEN4

SAME = (1, 1, 1, 1)
BLOCK = Conv2d(8, 64, 64, (56, 56), (3, 3), padding=SAME)
SMALL = Conv2d(8, 24, 24, (14, 14), (3, 3), padding=SAME)
STEM = Conv2d(8, 3, 64, (224, 224), (7, 7), (2, 2), (3, 3, 3, 3))
POINTS = Conv2d(8, 64, 256, (56, 56), (1, 1))
DEPTHWISE = Conv2d(8, 32, 32, (112, 112), (3, 3), padding=SAME, groups=32)
GROUPS = Conv2d(4, 48, 48, (40, 40), (3, 3), (2, 2), SAME, groups=16)
VOLUME = Conv3d(replace(SMALL, strides=(2, 2)), Windows(9, 3, 1, 1, 1, 1))
KINDS = FORWARD, DATA, WEIGHT
HALVES = {"dtypes": ("bfloat16", "bfloat16")}


@pytest.mark.parametrize(
    ("conv", "names"),
    {
        "products are images": (POINTS, ("product", "product", "direct")),
        "images": (BLOCK, ("winograd", "winograd", "winograd")),
        "few channels for Winograd": (SMALL, ("direct", "direct", "direct")),
        "a first convolution": (STEM, ("direct", "few channels", "stem")),
        "depthwise": (DEPTHWISE, ("depthwise", "depthwise", "depthwise")),
        "groups": (GROUPS, ("direct", "few channels", "direct")),
        "volumes": (VOLUME, ("direct", "direct", "direct")),
    }.values(),
)
def test_the_ways_of_convolutions(conv, names):
    cpu = cpu_of(ZEN4)
    assert tuple(way_of(conv, of, cpu).name for of in KINDS) == names
    assert tuple(plan(conv, of, cpu).way.name for of in KINDS) == names


def test_winograd_has_the_chosen_squares():
    for square in (2, 4):
        assert way_of(BLOCK, FORWARD, cpu_of(ZEN4), square=square).square == square
    assert way_of(BLOCK, FORWARD, cpu_of(ZEN4), square=0).name == "direct"


def test_convolutions_without_a_kernel():
    cpu = cpu_of(AVX2)
    strided = replace(SMALL, size=(99, 99), strides=(33, 1))
    assert way_of(strided, DATA, cpu) is plan(strided, DATA, cpu) is None
    assert way_of(strided, FORWARD, cpu).name == "direct"
    assert way_of(replace(DEPTHWISE, strides=(5, 5)), DATA, cpu) is None
    wide = replace(DEPTHWISE, kernel=(1, 129), padding=(0, 64, 0, 64))
    assert all(way_of(wide, of, cpu) is None for of in KINDS)
    slices = Conv3d(DEPTHWISE, Windows(4, 3, 1, 1, 1, 1))
    assert all(way_of(slices, of, cpu) is None for of in KINDS)


def test_small_images_are_products_if_they_fill_vectors():
    points = Conv2d(8, 64, 64, (12, 12), (1, 1))
    assert way_of(points, FORWARD, cpu_of(ZEN4)).name == "product"
    assert way_of(points, FORWARD, cpu_of(ZEN4), **HALVES).name == "direct"
    symbolic = replace(points, batch=tirx.Var("n", "int32"))
    assert way_of(symbolic, FORWARD, cpu_of(ZEN4)).name == "direct"
    small = replace(points, size=(9, 9))
    ways = [way_of(small, FORWARD, cpu_of(row)).name for row in (ZEN4, ICE_LAKE)]
    assert ways == ["direct", "direct"]
    middle = replace(points, size=(8, 8))
    ways = [way_of(middle, FORWARD, cpu_of(row)).name for row in (ZEN4, ICE_LAKE)]
    assert ways == ["direct", "product"]


@pytest.mark.parametrize(
    ("row", "tile", "block", "task_panels"),
    [
        (GENERIC, (4, 2), (14, 4, 1), 1),
        (AVX2, (6, 2), (14, 4, 1), 1),
        (ZEN4, (14, 2), (14, 2, 1), 1),
        (NEON, (8, 3), (14, 4, 1), 1),
    ],
    ids=["generic", "AVX2", "Zen 4", "NEON"],
)
def test_a_direct_plan(row, tile, block, task_panels):
    own = plan(SMALL, FORWARD, cpu_of(row)).kernel
    assert (own.pixels, own.tile_vectors) == tile
    assert (own.block_rows, own.block_images, own.depths) == block
    assert own.task_panels == task_panels


def test_long_sums_are_divided():
    """32 KB of a panel of 32 channels and 9 taps are 28 source channels."""
    conv = replace(SMALL, batch=1, in_channels=512, out_channels=512)
    own = plan(conv, FORWARD, cpu_of(ZEN4), square=0).kernel
    assert (own.depth, own.depths, own.is_at_once) == (27, 19, False)
    assert own.is_streamed
    # Two blocks of 7 rows are few tasks for two threads: the panels are in 4 parts.
    assert (own.block_rows, own.row_blocks) == (7, 2)
    assert (own.panels, own.task_panels, own.parts) == (16, 4, 4)


def test_small_images_share_tiles():
    conv = replace(SMALL, in_channels=512, out_channels=512, size=(7, 7), strides=(2, 2))
    own = plan(conv, FORWARD, cpu_of(ZEN4)).kernel
    assert own.row_pixels(0) == 4
    assert own.tile_images == 2
    assert own.skips_padding(0)
    # The first tap of a row reads padding at its first column.
    assert own.inside(0, 0, 4)[0] == [1, 2, 3]
    assert not plan(replace(conv, padding=(0,) * 4), FORWARD, cpu_of(ZEN4)).kernel.skips_padding(0)


def test_a_source_in_place_is_prefetched_if_it_is_small():
    points = Conv2d(8, 130, 70, (7, 7), (1, 1))
    own = plan(points, FORWARD, cpu_of(ZEN4)).kernel
    assert not own.is_packed
    assert own.channels_ahead == ZEN4.prefetch.steps
    padded = replace(points, padding=SAME)
    assert plan(padded, FORWARD, cpu_of(ZEN4)).kernel.is_packed


def test_pairs_of_bfloat16_have_half_the_source_channels():
    cpu = cpu_of(ZEN4, bfloat16=True)
    halves = plan(replace(SMALL, in_channels=25), FORWARD, cpu, **HALVES)
    assert halves.pairs
    assert halves.kernel.gathering.sources == 13
    assert halves.lines()["elements"] == "pairs of bfloat16"
    mixed = plan(SMALL, FORWARD, cpu, dtypes=("bfloat16", "float32"))
    assert not mixed.pairs
    # Winograd's filtering with squares of 2 saves no time where pairs are multiplied.
    assert way_of(BLOCK, FORWARD, cpu, **HALVES).name == "direct"
    assert way_of(BLOCK, FORWARD, cpu, square=4, **HALVES).name == "winograd"


def test_tiles_of_bfloat16():
    cpu = cpu_of(ICE_LAKE, tiles=True, bfloat16=True)
    forward, weight = (plan(BLOCK, of, cpu, **HALVES) for of in (FORWARD, WEIGHT))
    assert forward.way.name == weight.way.name == "tiles"
    assert not forward.pairs
    assert (forward.kernel.height, forward.kernel.steps, forward.kernel.task_rows) == (32, 2, 28)
    # An odd number of cache lines, so that the rows of a tile are in different sets.
    assert forward.kernel.plane // 16 % 2 == 1
    assert (weight.kernel.images, weight.kernel.task_rows, weight.kernel.parts) == (1, 8, (2, 1))
    few = replace(BLOCK, in_channels=15)
    assert way_of(few, FORWARD, cpu, **HALVES).name == "direct"
    assert way_of(few, DATA, cpu, **HALVES).name == "tiles"
    assert way_of(few, WEIGHT, cpu, **HALVES).name == "direct"


def test_a_winograd_plan():
    cpu = cpu_of(ZEN4)
    own = plan(BLOCK, FORWARD, cpu).kernel
    assert (own.squares.tall, own.squares.wide, own.squares.cells) == (28, 28, 16)
    assert own.is_fused
    assert (own.tile_rows, own.tile_vectors, own.rows) == (8, 2, 2)
    # A weight of 9.4 MB leaves the cache: each step is performed for several images.
    large = replace(BLOCK, in_channels=384, out_channels=384, size=(14, 14))
    steps = plan(large, FORWARD, cpu).kernel
    assert not steps.is_fused
    assert (steps.images, steps.rows) == (3, 7)
    assert steps.depth == 192
    assert plan(BLOCK, DATA, cpu).kernel.slices.is_flipped


def test_a_winograd_plan_of_a_weight_gradient():
    cpu = cpu_of(ZEN4)
    own = plan(BLOCK, WEIGHT, cpu).kernel
    assert (own.parts, own.chunks.rows, own.sums_own) == (8, 4, True)
    assert not plan(BLOCK, WEIGHT, cpu_of(ZEN4, 9)).kernel.sums_own
    assert own.stretch == 256
    depth = Windows(8, 3, 1, 1, 1, 1)
    assert plan(Conv3d(BLOCK, depth), WEIGHT, cpu).kernel.stretch == 0


def test_plans_of_depthwise_convolutions():
    cpu = cpu_of(ZEN4)
    forward, data, weight = (plan(DEPTHWISE, of, cpu).kernel for of in KINDS)
    assert forward.columns_at_once(0) == data.columns_at_once(0) == 7
    assert (forward.images, weight.images) == (1, 1)
    assert 4 * forward.pitch * forward.rows.span(forward.chunks.rows) <= 96 * 1024
    assert [len(taps) for taps in weight.tiles] == [9]
    short = plan(DEPTHWISE, WEIGHT, cpu_of(AVX2)).kernel
    assert [len(taps) for taps in short.tiles] == [9]
    wide = replace(DEPTHWISE, kernel=(5, 5), padding=(2, 2, 2, 2), size=(7, 7))
    short = plan(wide, WEIGHT, cpu_of(AVX2)).kernel
    assert [len(taps) for taps in short.tiles] == [10, 10, 5]
    assert short.images == 1024 // 49


def test_a_weight_gradient():
    own = plan(SMALL, WEIGHT, cpu_of(ZEN4)).kernel
    assert (own.tile.outs, own.tile.columns, own.tile.vectors) == (8, 3, 1)
    assert own.is_at_once
    assert own.parts == (2, 1)
    points = plan(POINTS, WEIGHT, cpu_of(ZEN4)).kernel
    assert (points.conv.size, points.tile.vectors) == ((4, 784), 2)
    assert not points.is_at_once
    stem = plan(STEM, WEIGHT, cpu_of(ZEN4, 8)).kernel
    assert stem.parts == (2, 4)
    assert [len(taps) for taps in stem.groups] == [11, 10]


def test_symbolic_batches():
    batch = tirx.Var("n", "int32")
    for conv in (BLOCK, SMALL, STEM, POINTS, DEPTHWISE, GROUPS):
        for of in KINDS:
            own = plan(replace(conv, batch=batch), of, cpu_of(ZEN4))
            assert own.lines()["convolution"].startswith("symbolic x ")


def test_plans_are_frozen_values():
    for of in KINDS:
        first, second = (plan(SMALL, of, cpu_of(ZEN4)) for _ in range(2))
        assert first == second
        with pytest.raises(FrozenInstanceError):
            first.kernel.lanes = 4


def test_plans_as_text():
    own = plan(SMALL, FORWARD, cpu_of(ZEN4))
    lines = str(own).splitlines()
    assert len(lines) == len(own.lines())
    assert "convolution: 8 x 24 x 14 x 14, 24 x 24 x 3 x 3" in lines
    assert "tile:        14 pixels x 2 vectors" in lines
    assert "tasks:       4 x 1 blocks, 1 parts of 1 panels" in lines
    for row in ROWS:
        for conv in (BLOCK, SMALL, STEM, POINTS, DEPTHWISE, GROUPS, VOLUME):
            assert all(row.name in str(plan(conv, of, cpu_of(row))) for of in KINDS)
