"""Sums over some axes against NumPy in float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import Run, each_target, largest_error, run_kernels
from sweep import at_length, batches
from tvm import tirx

from relax_grad.cpu.kernel.reduction.reduce import Channels, sum_channels, sum_columns
from relax_grad.cpu.target import CPU

RNG = np.random.default_rng(0)


def check(cases, target):
    """Compare sums of ``(kind, outer, middle, inner, symbolic, mean)``, compiled together, with
    NumPy's."""
    runs = []
    for kind, outer, middle, inner, symbolic, mean in cases:
        n = tirx.Var("n", "int32") if symbolic else outer
        if kind == "channels":
            of = Channels(n, middle, inner)
            shapes, result = [[n, middle, inner], [middle]], (middle,)
            function = sum_channels(of, shapes, CPU.of(target), mean)
        elif kind == "columns":
            n = tirx.Var("n", "int32") if symbolic else outer * middle
            shapes, result = [[n, inner], [inner]], (inner,)
            function = sum_columns(1, n, inner, shapes, CPU.of(target), mean)
        else:
            shapes, result = [[n, middle, inner], [n, inner]], (outer, inner)
            function = sum_columns(n, middle, inner, shapes, CPU.of(target), mean)
        shape = (outer * middle, inner) if kind == "columns" else (outer, middle, inner)
        runs.append(Run(function, [RNG.normal(size=shape).astype("float32")], [result]))
    for case, run, (output,) in zip(cases, runs, run_kernels(runs, target), strict=True):
        axes = {"channels": (0, 2), "columns": 0, "inner columns": 1}[case[0]]
        array = run.inputs[0].astype("float64")
        wanted = array.mean(axes) if case[-1] else array.sum(axes)
        assert largest_error(output, wanted) < 1e-5, case


KINDS = ["channels", "columns", "inner columns"]


@each_target
@pytest.mark.parametrize("symbolic", [False, True])
def test_sizes_around_vectors(target, symbolic):
    sizes = [(1, 1, 1), (3, 40, 16), (40, 7, 67), (2, 3, 300), (5, 90, 130)]
    check([(kind, *size, symbolic, size[0] > 3) for size in sizes for kind in KINDS], target)


@each_target
@pytest.mark.parametrize("symbolic", [False, True])
def test_sums_in_the_cache(target, symbolic):
    """Of more columns than a block in registers has: one block, several ones, and rows that are
    added one by one behind those that are added together."""
    sizes = [(1, 32, 129), (1, 47, 300), (2, 261, 161), (1, 70, 2049), (1, 33, 4101), (3, 40, 520)]
    kinds = ["columns", "inner columns"]
    check([(kind, *size, symbolic, size[0] > 2) for size in sizes for kind in kinds], target)


@pytest.mark.slow
@each_target
@at_length(150)
@given(
    cases=batches(
        st.tuples(
            st.sampled_from(KINDS),
            st.integers(1, 40),
            st.integers(1, 40),
            st.integers(1, 200),
            st.booleans(),
            st.booleans(),
        )
    )
)
def test_any_size(target, cases):
    check(cases, target)
