"""The gradient of taking rows against NumPy in float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import Run, each_target, largest_error, run_kernels
from sweep import at_length, batches
from tvm import tirx

from relax_grad.kernel.index import take_backward
from relax_grad.target import CPU

RNG = np.random.default_rng(0)


def element(index, extent, mode):
    """The row that an index means; None where there is none."""
    if mode == "clip":
        return min(max(index, 0), extent - 1)
    if mode == "wrap":
        return index % extent
    index += extent * (mode == "fast" and index < 0)
    return index if 0 <= index < extent else None


def check(cases, target):
    """Compare ``(outer, extent, columns, number, mode, symbolic)``, compiled together, with sums by NumPy."""
    runs, wanted = [], []
    for outer, extent, columns, number, mode, symbolic in cases:
        v, n = (tirx.Var(name, "int32") for name in "vn") if symbolic else (extent, number)
        shapes = [(outer, n, columns), (n,), (outer, v, columns)]
        function = take_backward(outer, v, columns, shapes, "int64", mode, CPU.of(target))
        dy = RNG.normal(size=(outer, number, columns)).astype("float32")
        indices = RNG.integers(-2 * extent, 2 * extent, number)
        indices[0] = RNG.choice([-(2**62), -(2**32), 0, 2**31, 2**32 + 1, 2**62])
        exact = np.zeros((outer, extent, columns))
        for i, index in enumerate(indices):
            at = element(int(index), extent, mode)
            if at is not None:
                exact[:, at] += dy[:, i]
        runs.append(Run(function, [dy, indices], [exact.shape]))
        wanted.append(exact)
    for case, exact, (found,) in zip(cases, wanted, run_kernels(runs, target), strict=True):
        assert largest_error(found, exact) < 1e-5, case


@each_target
def test_modes(target):
    modes = ["fast", "clip", "wrap", "nan"]
    check([(2, 5, 70, 40, mode, mode in ("fast", "wrap")) for mode in modes], target)


@pytest.mark.slow
@each_target
@at_length(150)
@given(
    cases=batches(
        st.tuples(
            st.integers(1, 3),
            st.integers(1, 20),
            st.integers(1, 200),
            st.integers(1, 60),
            st.sampled_from(["fast", "clip", "wrap", "nan"]),
            st.booleans(),
        )
    )
)
def test_any_embedding(target, cases):
    check(cases, target)
