"""Taking columns, and the gradients of taking and gathering, against NumPy in float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import Run, each_target, largest_error, run_kernels
from sweep import at_length, batches
from tvm import tirx

from relax_grad.cpu.kernel.movement.index import (
    gather_elements_backward,
    points_backward,
    take_backward,
    take_columns,
)
from relax_grad.cpu.target import CPU

RNG = np.random.default_rng(0)


def element(index, extent, mode):
    """Return the row that an index selects, or None for an index out of bounds."""
    if mode == "clip":
        return min(max(index, 0), extent - 1)
    if mode == "wrap":
        return index % extent
    index += extent * (mode == "fast" and index < 0)
    return index if 0 <= index < extent else None


def some_indices(extent, number):
    indices = RNG.integers(-2 * extent, 2 * extent, number)
    indices.flat[0] = RNG.choice([-(2**62), -(2**32), 0, 2**31, 2**32 + 1, 2**62])
    return indices


def check(cases, target):
    """Compare ``(outer, extent, columns, number, mode, symbolic)``, compiled together, with NumPy's
    sums."""
    runs, wanted = [], []
    for outer, extent, columns, number, mode, symbolic in cases:
        v, n = (tirx.Var(name, "int32") for name in "vn") if symbolic else (extent, number)
        shapes = [(outer, n, columns), (n,), (outer, v, columns)]
        function = take_backward(outer, v, columns, shapes, "int64", mode, CPU.of(target))
        dy = RNG.normal(size=(outer, number, columns)).astype("float32")
        indices = some_indices(extent, number)
        exact = np.zeros((outer, extent, columns))
        for i, index in enumerate(indices):
            at = element(int(index), extent, mode)
            if at is not None:
                exact[:, at] += dy[:, i]
        runs.append(Run(function, [dy, indices], [exact.shape]))
        wanted.append(exact)
    for case, exact, (result,) in zip(cases, wanted, run_kernels(runs, target), strict=True):
        assert largest_error(result, exact) < 1e-5, case


@each_target
def test_modes(target):
    modes = ["fast", "clip", "wrap", "nan"]
    check([(2, 5, 70, 40, mode, mode in ("fast", "wrap")) for mode in modes], target)


def check_gathers(cases, target):
    """Compare ``(kind, extents, columns, number, symbolic)``, compiled together, with NumPy."""
    runs, wanted = [], []
    for kind, extents, columns, number, symbolic in cases:
        cpu = CPU.of(target)
        n = tirx.Var("n", "int32") if symbolic else number
        rows = tirx.Var("m", "int32") if symbolic else extents[0]
        if kind == "take":
            shapes = [(rows, extents[-1]), (n,), (rows, n)]
            function = take_columns(rows, extents[-1], shapes, "int64", "fast")
            x = RNG.normal(size=(extents[0], extents[-1])).astype("float32")
            indices = some_indices(extents[-1], number)
            places = [element(int(i), extents[-1], "fast") for i in indices]
            exact = np.stack(
                [np.full(len(x), np.nan) if at is None else x[:, at] for at in places], 1
            )
            runs.append(Run(function, [x, indices], [exact.shape]))
            wanted.append(exact)
            continue
        if kind == "gather":
            length = extents[-1]
            shapes = [(rows, n), (rows, n), (rows, length)]
            function = gather_elements_backward(rows, (length, n), shapes, "int64", cpu)
            dy = RNG.normal(size=(extents[0], number)).astype("float32")
            indices = some_indices(length, dy.shape)
            exact = np.zeros((extents[0], length))
            for row, i in np.ndindex(dy.shape):
                at = element(int(indices[row, i]), length, "fast")
                if at is not None:
                    exact[row, at] += dy[row, i]
            runs.append(Run(function, [dy, indices], [exact.shape]))
            wanted.append(exact)
            continue
        dy = RNG.normal(size=(number, columns)).astype("float32")
        indices = [some_indices(extent, number) for extent in extents]
        exact = np.zeros((*extents, columns))
        for k in range(number):
            at = [element(int(i[k]), e, "fast") for i, e in zip(indices, extents, strict=True)]
            if None not in at:
                exact[tuple(at)] += dy[k]
        together = kind == "nd"
        of_indices = [(n, len(extents))] if together else [(n,)] * len(extents)
        if together:
            indices = [np.stack(indices, 1)]
        shapes = [(n, columns), *of_indices, (rows, *extents[1:], columns)]
        function = points_backward(
            [rows, *extents[1:]], columns, n, shapes, ["int64"] * len(indices), cpu
        )
        runs.append(Run(function, [dy, *indices], [exact.shape]))
        wanted.append(exact)
    for case, exact, (result,) in zip(cases, wanted, run_kernels(runs, target), strict=True):
        assert np.array_equal(np.isnan(result), np.isnan(exact)), case
        assert largest_error(np.nan_to_num(result), np.nan_to_num(exact)) < 1e-5, case


KINDS = ["take", "gather", "nd", "tensors"]


@each_target
def test_gathers(target):
    check_gathers([(kind, (1, 37), 1, 50, kind == "nd") for kind in KINDS], target)
    check_gathers([(kind, (5, 4), 70, 90, kind != "nd") for kind in KINDS], target)


@pytest.mark.slow
@each_target
@at_length(150)
@given(
    cases=batches(
        st.tuples(
            st.sampled_from(KINDS),
            st.lists(st.integers(1, 20), min_size=1, max_size=3).map(tuple),
            st.integers(1, 100),
            st.integers(1, 60),
            st.booleans(),
        )
    )
)
def test_any_gather(target, cases):
    check_gathers(cases, target)


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
