"""The prefetches of kernels: of results, of later panels, and of rows some steps ahead."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from machines import Run, run_kernels
from tvm import tirx

from relax_grad.cpu.kernel.attention.forward import attention
from relax_grad.cpu.kernel.attention.sizes import Attention
from relax_grad.cpu.kernel.conv.direct import conv2d
from relax_grad.cpu.kernel.conv.geometry import Conv2d
from relax_grad.cpu.kernel.language import builder as b
from relax_grad.cpu.kernel.language.builder import bind
from relax_grad.cpu.kernel.matmul.matmul import Matmul, matmul
from relax_grad.cpu.kernel.matmul.plan import packed_plan
from relax_grad.cpu.kernel.matmul.tile import Ahead, spread
from relax_grad.cpu.target import CPU
from relax_grad.cpu.tuning import ICE_LAKE


def test_which_rows_are_prefetched_some_steps_ahead():
    """Parts of long rows, of a factor in distant caches if it is copied, where that was measured:
    on Intel's processors."""
    amd = CPU(16, 32, 2)
    intel = replace(amd, tuning=ICE_LAKE)

    def prefetches(*size: int, cpu: CPU = intel) -> bool:
        return ", 0, 3, 1)" in matmul(Matmul(*size), cpu, way="few rows").script()

    assert prefetches(8, 1024, 256)
    assert prefetches(3, 100, 50)
    assert not prefetches(1, 1024, 1024)
    assert not prefetches(8, 1024, 256, cpu=amd)

    def ahead(*product, cpu: CPU = intel) -> tuple[int, int]:
        plan = packed_plan(Matmul(*product), cpu)
        return plan.ahead_b, plan.ahead_a

    assert ahead(64, 1024, 1024) == (4, 0)
    assert ahead(2000, 1024, 1024, True) == (4, 4)
    assert ahead(2000, 1024, 1024, True, cpu=amd) == (0, 0)
    assert ahead(600, 1024, 256, True) == (0, 0)  # near
    assert ahead(300, 300, 2000, True) == (0, 0)  # short


def test_channels_of_small_images_are_prefetched():
    """Those of images that are read in place, on Intel's processors."""
    amd = CPU(16, 32, 2)

    def prefetches(size: int, cpu: CPU) -> bool:
        conv = Conv2d(2, 64, 48, (size, size), (1, 1))
        return ", 0, 3, 1)" in conv2d(conv, cpu).script()

    assert prefetches(7, replace(amd, tuning=ICE_LAKE))
    assert not prefetches(7, amd)
    assert not prefetches(9, replace(amd, tuning=ICE_LAKE))


def test_rows_of_heads_are_prefetched():
    """Those of several heads, which are copied, on Intel's processors."""
    amd = CPU(16, 32, 2)

    def prefetches(heads: int, cpu: CPU) -> int:
        of = Attention(2, 300, 300, heads, heads, 64, 64, 0.1)
        shapes = [[2, 300, heads, 64]] * 4
        return attention(of, shapes, cpu).script().count(", 0, 3, 1)")

    # Four lines of a row of values; those of one head follow each other, and are not copied.
    intel = replace(amd, tuning=ICE_LAKE)
    assert prefetches(12, intel) - prefetches(12, amd) == 4
    assert prefetches(1, intel) == prefetches(1, amd)


@pytest.mark.parametrize("properties", [(16, 32, 1), (8, 16, 1)])
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("columns", [1024, 1008])
def test_tiles_prefetch_all_of_the_next_panel(columns, transpose_b, properties):
    """Each tile of a panel prefetches a part of the next one, without a loop."""
    product, cpu = Matmul(512, columns, 1024, False, transpose_b), CPU(*properties)
    plan = packed_plan(product, cpu)
    lines = plan.stretch * plan.width // 16
    # The tiles of a last panel with fewer columns are in the code too.
    codes = 1 + (columns % plan.width > 0)
    of_second_level = matmul(product, cpu).script().count(", 0, 2, 1)")
    number, strips = of_second_level // codes, plan.block[0]
    assert lines <= number * strips < lines + plan.width // 16 * strips


@pytest.mark.parametrize("transpose_b", [False, True])
def test_tiles_of_intel_prefetch_during_their_steps(transpose_b):
    """Both C, if a second-level cache does not hold it, and the next panel, in loops over steps."""
    cpu = CPU(16, 32, 2, tuning=ICE_LAKE)

    def prefetched(*size):
        function = matmul(Matmul(*size, False, transpose_b), cpu)
        return re.findall(r"prefetch.*address_of\((\w+)\[.*, 0, (\d), 1\)", function.script())

    of_c, of_b = "buffer_2", "buffer_1"
    large = prefetched(1008, 1008, 1024)
    assert {name for name, level in large if level == "2"} == {of_b, of_c}
    # In loops: a burst of C alone would be 27 in each tile.
    assert len(large) < 10
    # Less of C is prefetched at once, if it is added to, into the first-level cache. Rows of B are
    # prefetched while a panel is packed, as the tiles of few rows leave no time for the next one.
    small = prefetched(99, 1008, 1024)
    assert small == [(of_b, "3")] * (0 if transpose_b else 3) + [(of_c, "3")] * 27


@pytest.mark.parametrize("is_symbolic", [False, True])
@pytest.mark.parametrize("others", [None, 0, 1, 13, 300])
def test_prefetches_that_are_spread_over_rounds(is_symbolic, others):
    """All lines of the first kind are prefetched, and of the second as far as rounds are left; each
    round is computed once, in order."""
    own, expected = (9, 3), 48
    runs, sizes = [], [0, 1, 5, 26, 27, 28, 48, 100]
    for number in sizes:

        def emit(count, rounds, lines, more, number=number):
            total = bind(tirx.Cast("int32", count[0])) if is_symbolic else number
            ahead = [Ahead(own[0], lambda i, j: b.store(lines, i * 3 + j, b.as_float(1)), own[1])]
            if others is not None:
                ahead.append(Ahead(others, lambda i, _: b.store(more, i, b.as_float(1))))
            place = b.scratch(1)
            b.store(place, 0, b.as_float(0))

            def one(i) -> None:
                b.store(place, 0, place[0] + b.as_float(1))
                b.store(rounds, i, place[0])

            spread(ahead, total, expected, one)

        params = b.floats("abcd", [[1], [101], [64], [301]])
        zeros = [np.array([number], "float32")]
        runs.append(Run(b.prim_func("spread", params, emit), zeros, [(101,), (64,), (301,)]))
    for number, (rounds, lines, more) in zip(
        sizes, run_kernels(runs, {"kind": "llvm"}), strict=True
    ):
        assert rounds[:number].tolist() == list(range(1, number + 1))
        assert np.isnan(rounds[number:]).all()
        if is_symbolic or number > 0:
            assert (lines[:27] == 1).all()
        marked = np.flatnonzero(~np.isnan(more))
        assert marked.tolist() == list(range(len(marked)))
        assert len(marked) <= (others or 0)
        if number == expected:
            assert len(marked) == (others or 0)
