"""Attention against PyTorch in float64: sizes around blocks and tiles, masks, biases, and numbers
that are not finite."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from attentions import (
    DROPPED,
    HEADS_FIRST,
    MASKS,
    SIZE_PARAMS,
    TURNED,
    WIDE,
    drawn,
    in_orders,
    reference,
    sized,
    with_generator,
)
from hypothesis import given
from machines import Run, at, each_target, largest_error, makers, run_kernels
from sweep import at_length, batches

from relax_grad.cpu.kernel.attention._tiles import Tiles
from relax_grad.cpu.kernel.attention.forward import attention
from relax_grad.cpu.target import CPU
from relax_grad.cpu.tuning import EARLY_AVX512, ICE_LAKE, ZEN4

torch = pytest.importorskip("torch", reason="PyTorch is not installed: nothing to compare with")

RNG = np.random.default_rng(0)


def check(cases, target, **properties):
    """Compare kernels of ``(sizes, symbolic, bias, attrs)``, compiled together, with PyTorch; a
    case may also have the numbers of tensors with the heads before the positions, and of those with
    the heads before the features. The makers of the processor take turns."""
    runs, wanted, turned = [], [], []
    cpus = makers(replace(CPU.of(target), **properties))
    for i, (sizes, symbolic, bias, attrs, *orders) in enumerate(cases):
        numbers, keys = map(set, [*orders, (), ()][:2])
        of, shapes, names = sized(sizes, symbolic, bias, **attrs)
        arrays = [RNG.normal(size=at(shape, names)).astype("float32") for shape in shapes]
        taken = with_generator(of, in_orders(arrays[:-2], numbers & {0, 1, 2}, keys))
        turned.append(3 in numbers)
        exchanged = sorted(numbers & {0, 1, 2}) + [len(taken)] * turned[-1]
        function = attention(
            of,
            shapes[:-1],
            cpus[i % len(cpus)],
            saves_sums=True,
            exchanged=exchanged,
            turned=sorted(keys & {1}),
        )
        outputs = in_orders(arrays[-2:], {0} if turned[-1] else ())
        runs.append(Run(function, taken, [array.shape for array in outputs]))
        inputs = [torch.from_numpy(array).double() for array in arrays[:-2]]
        wanted.append(reference(of, *inputs))
    runs = zip(cases, run_kernels(runs, target), wanted, turned, strict=True)
    for case, results, expected, is_turned in runs:
        results = in_orders(results, {0} if is_turned else ())
        for got, value in zip(results, expected, strict=True):
            if got is results[-1] and case[0][2] <= 256:
                # Weights of masked keys may be unwritten.
                got = np.where(np.isnan(got) & (value.numpy() == 0), np.float32(0), got)
            is_finite = np.isfinite(value.numpy())
            assert np.array_equal(np.isfinite(got), is_finite), case
            assert largest_error(got[is_finite], value.numpy()[is_finite]) < 2e-6, case


@each_target
@pytest.mark.parametrize("sizes", SIZE_PARAMS, ids=str)
def test_sizes(target, sizes):
    symbolic = ["queries", "keys"] if sizes[2] > 128 else ["batch"]
    check([(sizes, (), None, {}), (sizes, symbolic, None, MASKS[1])], target)


@each_target
@pytest.mark.parametrize("attrs", MASKS, ids=str)
def test_masks(target, attrs):
    # Every second mask has more queries than keys, and the others fewer.
    sizes = [(1, 131, 70, 2, 1, 5, 7), (1, 70, 131, 1, 1, 7, 5)][MASKS.index(attrs) % 2]
    check([(sizes, (), None, attrs)], target)


@each_target
@pytest.mark.parametrize("bias", [(2, 3), (0, 3), (1, 2), (3,), ()], ids=str)
def test_a_bias_is_broadcast(target, bias):
    check([((2, 21, 35, 4, 2, 5, 7), (), bias, attrs) for attrs in MASKS[:2]], target)


@each_target
def test_dropped_weights(target):
    check(DROPPED, target)


def test_tiles_are_wide_where_they_were_measured():
    cpu = CPU(16, 32, 2, tuning=EARLY_AVX512)

    def size_of(keys, features, causal_mask=None, cpu=cpu):
        of, _, _ = sized((1, 600, keys, 1, 1, features, 64), (), None, causal_mask=causal_mask)
        tiles = Tiles.of(of, cpu)
        return tiles.rows, tiles.vectors, tiles.columns_of(64)

    wide, narrow = (6, 4, [(0, 4)]), (8, 2, [(0, 2), (32, 2)])
    assert size_of(49, 33) == size_of(128, 64, "TopLeft") == size_of(1000, 64) == wide
    assert size_of(48, 64) == size_of(127, 64, "BottomRight") == size_of(1000, 32) == narrow
    for other in ({"tuning": ICE_LAKE}, {"tuning": ZEN4}, {"bfloat16": True}):
        assert size_of(1000, 64, cpu=replace(cpu, **other))[1] == 2
    assert size_of(16, 64)[1] == 1


def test_tiles_divide_the_vectors_of_features_evenly():
    assert Tiles(16, 6, 6, 4, 4).columns_of(80) == [(0, 3), (48, 2)]
    assert Tiles(16, 6, 6, 4, 4).columns_of(33) == [(0, 3)]
    assert Tiles(8, 6, 6, 2, 2).columns_of(40) == [(0, 2), (16, 2), (32, 1)]


@each_target
def test_wide_tiles(target):
    tuning = replace(CPU.of(target).tuning, attention=EARLY_AVX512.attention)
    check(WIDE, target, tuning=tuning)


@each_target
def test_heads_before_positions(target):
    check(HEADS_FIRST, target)


@each_target
def test_keys_with_heads_before_features(target):
    check(TURNED, target)


def run_with(target, bias, scale=1.0, queries=3, keys=5):
    """Return the attention of queries whose scores are the bias, with values 1, 2, and so on."""
    sizes = (1, queries, keys, 1, 1, 1, 1)
    of, shapes, _ = sized(sizes, ["keys"], (2, 3), scale=scale)  # saves the sums
    function = attention(of, shapes[:-1], CPU.of(target), saves_sums=True)
    zeros = np.zeros((1, queries, 1, 1), "float32"), np.zeros((1, keys, 1, 1), "float32")
    value = np.arange(1, keys + 1, dtype="float32").reshape(1, keys, 1, 1)
    bias = np.asarray(bias, "float32").reshape(1, 1, queries, keys)
    outputs = [(1, queries, 1, 1), (1, 1, queries, 2)]
    ((result, sums),) = run_kernels([Run(function, [*zeros, value, bias], outputs)], target)
    return result.ravel(), sums.reshape(queries, 2)


@each_target
def test_rows_without_keys_are_0_and_other_rows_are_unaffected(target):
    infinite = -np.inf
    result, sums = run_with(
        target, [[infinite] * 5, [0, infinite, infinite, infinite, 0], [infinite] * 4 + [3]]
    )
    np.testing.assert_allclose(result, [0, 3, 5], 1e-6)
    np.testing.assert_allclose(sums, [[0, np.inf], [0, np.log(2)], [3, 0]], 1e-6, 1e-6)


@each_target
def test_numbers_that_are_not_finite_stay_in_their_row(target):
    result, sums = run_with(target, [[0, np.nan, 0, 0, 0], [0, np.inf, 0, 0, 0], [0, 0, 0, 0, 0]])
    assert np.isnan(result[:2]).all()
    assert np.isnan(sums[:2, 1]).all()
    np.testing.assert_allclose(result[2], 3, 1e-6)


@each_target
def test_large_scores_do_not_overflow(target):
    rows = [[3e38, -3e38, 0, 0, 0], [-3e38] * 5, [1e4, 1e4 - 1, -1e4, -200, -87]]
    result, _ = run_with(target, rows)
    share = np.exp(-1) / (1 + np.exp(-1))
    np.testing.assert_allclose(result, [1, 3, 1 + share], 1e-6)


@each_target
def test_a_later_block_with_larger_scores(target):
    """The sums of the first blocks are rescaled, also by 0."""
    keys = 400
    bias = np.linspace(-300, 300, keys)[None].repeat(2, 0)
    bias[1] *= -1
    result, sums = run_with(target, bias, queries=2, keys=keys)
    weights = np.exp(bias - bias.max(1, keepdims=True))
    wanted = (weights * np.arange(1, keys + 1)).sum(1) / weights.sum(1)
    np.testing.assert_allclose(result, wanted, 1e-6)
    saved = np.stack([[300, 300], np.log(weights.sum(1))], 1)
    np.testing.assert_allclose(sums, saved, 1e-6, 1e-5)


@pytest.mark.slow
@each_target
@at_length(75)
@given(cases=batches(drawn()))
def test_any_size(target, cases):
    check(cases, target)
