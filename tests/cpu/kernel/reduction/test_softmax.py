"""Softmax, log_softmax and its gradient against PyTorch in float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import Run, each_target, largest_error, run_kernels
from sweep import at_length, batches
from tvm import tirx

from relax_grad.cpu.kernel.reduction import softmax as kernels
from relax_grad.cpu.kernel.reduction.lines import Lines
from relax_grad.cpu.target import CPU

torch = pytest.importorskip("torch", reason="PyTorch is not installed: nothing to compare with")

RNG = np.random.default_rng(0)


def backward(dy, y):
    return (dy - (dy * y).sum(1, keepdim=True)) * y


def log_backward(dy, y):
    return dy - dy.sum(1, keepdim=True) * torch.exp(y)


#: Each kernel, its number of inputs, and the function that it computes.
KERNELS = {
    "softmax": (kernels.softmax, 1, lambda x: torch.softmax(x, 1)),
    "log_softmax": (kernels.log_softmax, 1, lambda x: torch.log_softmax(x, 1)),
    "softmax_backward": (kernels.softmax_backward, 2, backward),
    "log_softmax_backward": (kernels.log_softmax_backward, 2, log_backward),
}


def check(cases, target, values=None):
    """Compare kernels of ``(name, outer, extent, inner, symbolic)``, compiled together, with
    PyTorch."""
    runs = []
    for name, *sizes, symbolic in cases:
        make, number, _ = KERNELS[name]
        shape = list(sizes)
        for axis in symbolic:
            shape[axis] = tirx.Var(f"n{axis}", "int32")
        function = make(Lines(*shape), shape, CPU.of(target))
        if values is None:
            scale = 1 if name == "log_softmax_backward" else 9
            inputs = [RNG.normal(0, scale, sizes).astype("float32") for _ in range(number)]
        else:
            inputs = [values.reshape(sizes)] * number
        runs.append(Run(function, inputs, [tuple(sizes)]))
    for case, run, (result,) in zip(cases, runs, run_kernels(runs, target), strict=True):
        wanted = KERNELS[case[0]][2](*(torch.from_numpy(array).double() for array in run.inputs))
        assert np.array_equal(np.isnan(result), np.isnan(wanted.numpy())), case
        if not np.isnan(result).any():
            assert largest_error(result, wanted.numpy()) < 1e-5, case


@each_target
def test_sizes_around_vectors(target):
    sizes = [(1, 1, 1), (3, 16, 1), (5, 67, 1), (2, 300, 1), (2, 3, 64), (1, 5, 7), (3, 4, 201)]
    check(
        [(name, *size, (0,) if size[1] > 16 else ()) for size in sizes for name in KERNELS], target
    )
    check([(name, 2, 3, inner, (0, 1, 2)) for inner in (1, 64, 75) for name in KERNELS], target)


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
    names = ["softmax", "log_softmax"]
    if np.isneginf(values).any() and not np.isneginf(values).all():
        names.pop()  # the logarithm of 0 is infinite and has no relative error
    check([(name, *values.shape, 1, ()) for name in names], target, values)
    columns = np.repeat(values.T, 21, axis=1)
    check([(name, 1, *columns.shape, ()) for name in names], target, columns)


@pytest.mark.slow
@each_target
@at_length(75)
@given(
    cases=batches(
        st.tuples(
            st.sampled_from(sorted(KERNELS)),
            st.integers(1, 20),
            st.integers(1, 200),
            st.one_of(st.just(1), st.integers(1, 150)),
            st.sampled_from([(), (0,), (1,), (0, 2)]),
        )
    )
)
def test_any_size(target, cases):
    check(cases, target)
