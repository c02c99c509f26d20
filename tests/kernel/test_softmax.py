"""Softmax, its logarithm and its gradient against PyTorch in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from machines import Run, each_target, largest_error, run_kernels
from sweep import at_length, batches
from tvm import tirx

from relax_grad.kernel import softmax as kernels
from relax_grad.target import CPU

RNG = np.random.default_rng(0)


def backward(dy, y):
    return (dy - (dy * y).sum(1, keepdim=True)) * y


#: Each kernel, how many tensors it takes, and what it computes.
KERNELS = {
    "softmax": (kernels.softmax, 1, lambda x: torch.softmax(x, 1)),
    "log_softmax": (kernels.log_softmax, 1, lambda x: torch.log_softmax(x, 1)),
    "softmax_backward": (kernels.softmax_backward, 2, backward),
}


def check(cases, target, values=None):
    """Compare kernels of ``(name, rows, columns, symbolic)``, compiled together, with PyTorch's."""
    runs = []
    for name, rows, columns, symbolic in cases:
        make, number, _ = KERNELS[name]
        extent = tirx.Var("n", "int32") if symbolic else rows
        function = make(extent, columns, [extent, columns], CPU.of(target))
        inputs = [
            values if values is not None else RNG.normal(0, 9, (rows, columns)).astype("float32")
            for _ in range(number)
        ]
        runs.append(Run(function, inputs, [(rows, columns)]))
    for case, run, (found,) in zip(cases, runs, run_kernels(runs, target), strict=True):
        wanted = KERNELS[case[0]][2](*(torch.from_numpy(array).double() for array in run.inputs))
        assert np.array_equal(np.isnan(found), np.isnan(wanted.numpy())), case
        if not np.isnan(found).any():
            assert largest_error(found, wanted.numpy()) < 1e-5, case


@each_target
def test_sizes_around_vectors(target):
    sizes = [(1, 1), (3, 16), (5, 67), (2, 300)]
    check([(name, *size, size[1] > 16) for size in sizes for name in KERNELS], target)


@each_target
@pytest.mark.parametrize(
    "row",
    [
        [-np.inf, 1, 2, -np.inf],
        [-np.inf, -np.inf],
        [np.inf, 1, 0],
        [np.nan, 1, 2],
        [1.6e38, -1.6e38, 1.6e38],
        [-200, 0, -87.5, -103.5],
    ],
    ids=str,
)
def test_edges(target, row):
    values = np.array([row], "float32")
    cases = [(name, *values.shape, False) for name in ("softmax", "log_softmax")]
    if np.isneginf(values).any() and not np.isneginf(values).all():
        cases.pop()  # the logarithm of 0 is infinite, which is no number to compare
    check(cases, target, values)


@pytest.mark.slow
@each_target
@at_length(150)
@given(
    cases=batches(
        st.tuples(
            st.sampled_from(sorted(KERNELS)),
            st.integers(1, 40),
            st.integers(1, 200),
            st.booleans(),
        )
    )
)
def test_any_size(target, cases):
    check(cases, target)
