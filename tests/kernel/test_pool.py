"""Pooling and its gradients against PyTorch, also for ties, infinities and NaN."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from machines import Run, each_target, largest_error, run_kernels
from sweep import at_length, batches
from tvm import tirx

from relax_grad.kernel.pool import Pool, Windows, avg_pool_backward, max_pool, max_pool_backward
from relax_grad.target import CPU

RNG = np.random.default_rng(0)
KINDS = ["max", "max_backward", "avg_backward", "avg_backward_with_padding"]


def values(kind, shape):
    """Numbers; many of them equal, and some that are none."""
    if kind == "plain":
        return RNG.normal(size=shape).astype("float32")
    return RNG.choice(np.array([0, 1, 2, np.nan if kind == "nan" else -np.inf], "float32"), shape)


def check(cases, target):
    """Compare ``(kind, planes, rows, columns, symbolic, values)``, compiled together, with PyTorch's."""
    runs, wanted = [], []
    for kind, planes, rows, columns, symbolic, numbers in cases:
        n = tirx.Var("n", "int32") if symbolic else planes
        pool, cpu = Pool(n, rows, columns), CPU.of(target)
        data, result = (n, rows.extent, columns.extent), (n, rows.number, columns.number)
        x = values(numbers, (planes, *data[1:]))
        dy = RNG.normal(size=(planes, *result[1:])).astype("float32")
        padded = torch.from_numpy(x).double().requires_grad_()
        if kind.startswith("max"):
            y = pooled_by_torch(padded, rows, columns)
        if kind == "max":
            runs.append(Run(max_pool(pool, [data, result], cpu), [x], [dy.shape]))
            wanted.append(y.detach().numpy())
            continue
        if kind == "max_backward":
            function = max_pool_backward(pool, [result, data, data], cpu)
            runs.append(Run(function, [dy, x], [x.shape]))
            (gradient,) = torch.autograd.grad(y, padded, torch.from_numpy(dy).double())
            wanted.append(gradient.numpy())
            continue
        include_pad = kind.endswith("padding")
        function = avg_pool_backward(pool, [result, data], cpu, include_pad)
        runs.append(Run(function, [dy], [x.shape]))
        wanted.append(average_gradient(dy, rows, columns, include_pad))
    for case, exact, (found,) in zip(cases, wanted, run_kernels(runs, target), strict=True):
        if case[0] == "max":
            assert np.array_equal(found, exact.astype("float32"), equal_nan=True), case
        else:
            assert largest_error(found, exact) < 1e-6, case


def pooled_by_torch(x, rows, columns):
    """Pooling of windows that need not fill the padded data: behind it, more padding."""
    before = rows.before, columns.before
    behind = [(w.number - 1) * w.stride + w.size - w.before - w.extent for w in (rows, columns)]
    pads = (before[1], max(0, behind[1]), before[0], max(0, behind[0]))
    lowest = torch.nn.functional.pad(x, pads, value=-float("inf"))
    y = torch.nn.functional.max_pool2d(
        lowest[None], (rows.size, columns.size), (rows.stride, columns.stride)
    )[0]
    return y[:, : rows.number, : columns.number]


def average_gradient(dy, rows, columns, include_pad):
    """Each window's gradient, divided by what it counts, added to each of its elements."""

    def spread(windows):
        """How much of each window's gradient each element has."""
        shares = np.zeros((windows.number, windows.extent))
        for o in range(windows.number):
            start = o * windows.stride - windows.before
            first = start if include_pad else max(start, 0)
            end = windows.extent + (windows.after if include_pad else 0)
            last = min(start + windows.size, end)
            shares[o, max(start, 0) : start + windows.size] = 1 / max(last - first, 1)
        return shares

    return np.einsum("por,oh,rw->phw", dy.astype("float64"), spread(rows), spread(columns))


@st.composite
def windows(draw, strides):
    size, stride = draw(st.integers(1, 5)), draw(strides)
    before, after = draw(st.integers(0, size - 1)), draw(st.integers(0, size - 1))
    extent = draw(st.integers(max(1, size - before - after), 40))
    number = (extent + before + after - size) // stride + 1
    # Of what ceil_mode adds, only a window that has an element.
    if draw(st.booleans()) and number * stride - before < extent:
        number += 1
    while (number - 1) * stride - before >= extent:
        number -= 1
    return Windows(extent, size, stride, before, number, after)


@st.composite
def case(draw):
    kind = draw(st.sampled_from(KINDS))
    return (
        kind,
        draw(st.integers(1, 40)),
        draw(windows(st.integers(1, 4))),
        draw(windows(st.integers(1, 2))),
        draw(st.booleans()),
        # Not negative infinity, which is what the data are padded with for PyTorch.
        "plain" if "avg" in kind else draw(st.sampled_from(["plain", "plain", "nan"])),
    )


@each_target
def test_windows_of_resnet_and_others(target):
    overlapping, halving = Windows(30, 3, 2, 1, 15, 1), Windows(32, 2, 2, 0, 16)
    sliding, long = Windows(37, 3, 1, 1, 37, 1), Windows(37, 5, 3, 2, 13, 2)
    pairs = [(overlapping, overlapping), (halving, halving), (long, sliding)]
    check([(kind, 5, *pair, pair[0] is long, "plain") for pair in pairs for kind in KINDS], target)


@each_target
def test_ties_infinities_and_nan(target):
    rows, columns = Windows(12, 3, 2, 0, 5), Windows(39, 3, 1, 0, 37)
    kinds = ["max", "max_backward"]
    check(
        [(kind, 7, rows, columns, False, numbers) for kind in kinds for numbers in ("few", "nan")],
        target,
    )


@each_target
def test_padding_never_wins(target):
    """Of a window in which nothing is above negative infinity, the first element that exists wins."""
    axis = Windows(3, 3, 2, 1, 2, 1)
    function = max_pool_backward(
        Pool(1, axis, axis), [(1, 2, 2), (1, 3, 3), (1, 3, 3)], CPU.of(target)
    )
    dy = np.array([[[1, 2], [3, 4]]], "float32")
    x = np.full((1, 3, 3), -np.inf, "float32")
    ((found,),) = run_kernels([Run(function, [dy, x], [x.shape])], target)
    assert found.tolist() == [[[1, 2, 0], [3, 4, 0], [0, 0, 0]]]


@pytest.mark.slow
@each_target
@at_length(150)
@given(cases=batches(case()))
def test_any_pool(target, cases):
    check(cases, target)


@each_target
@at_length(50)
@given(cases=batches(case()))
def test_some_pools(target, cases):
    check(cases, target)
