"""Pooling and its gradients against PyTorch, with ties, infinities and NaN."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import Run, each_target, largest_error, run_kernels
from sweep import at_length, batches
from tvm import tirx

from relax_grad.cpu.kernel.language import streams
from relax_grad.cpu.kernel.reduction.pool import (
    avg_pool,
    avg_pool_backward,
    max_pool,
    max_pool_backward,
)
from relax_grad.cpu.kernel.reduction.pool_geometry import Pool, Windows
from relax_grad.cpu.kernel.reduction.pool_plan import pool_plan
from relax_grad.cpu.target import CPU

torch = pytest.importorskip("torch", reason="PyTorch is not installed: nothing to compare with")

RNG = np.random.default_rng(0)
KINDS = [
    "max",
    "max_backward",
    "max_backward_saved",
    "avg",
    "avg_with_padding",
    "avg_backward",
    "avg_backward_with_padding",
]


def values(kind, shape):
    """Return random numbers: normal ones, or many equal ones that may contain NaN or infinities."""
    if kind == "plain":
        return RNG.normal(size=shape).astype("float32")
    last = {"nan": np.nan, "infinite": -np.inf, "few": 3}[kind]
    return RNG.choice(np.array([0, 1, 2, last], "float32"), shape)


def kernel(kind, planes, axes, cpu):
    """Return the kernel of a kind, for a number of planes or a variable."""
    pool = Pool(planes, tuple(axes[:-1]), axes[-1])
    data, result = (planes, *pool.extents), (planes, *pool.numbers)
    include_pad = kind.endswith("padding")
    if kind == "max":
        return max_pool(pool, [data, result], cpu)
    if kind.startswith("max"):
        return max_pool_backward(pool, [result, data, data], cpu, kind.endswith("saved"))
    if kind.startswith("avg_backward"):
        return avg_pool_backward(pool, [result, data], cpu, include_pad)
    return avg_pool(pool, [data, result], cpu, include_pad)


def check(cases, target, cpu=None):
    """Compare ``(kind, planes, windows of the axes, symbolic, values)``, compiled together, with
    PyTorch. Cases that differ in their values or in a symbolic number of planes share a kernel."""
    runs, wanted, kernels = [], [], {}
    for kind, planes, axes, symbolic, numbers in cases:
        key = kind, None if symbolic else planes, axes
        if key not in kernels:
            n = tirx.Var("n", "int32") if symbolic else planes
            kernels[key] = kernel(kind, n, axes, cpu or CPU.of(target))
        function = kernels[key]
        x = values(numbers, (planes, *(axis.extent for axis in axes)))
        dy = RNG.normal(size=(planes, *(axis.number for axis in axes))).astype("float32")
        include_pad = kind.endswith("padding")
        if kind.startswith("avg"):
            if kind.startswith("avg_backward"):
                runs.append(Run(function, [dy], [x.shape]))
                wanted.append(average_gradient(dy, axes, include_pad))
            else:
                runs.append(Run(function, [x], [dy.shape]))
                wanted.append(average(x, axes, include_pad))
            continue
        padded = torch.from_numpy(x).double().requires_grad_()
        y, winners = pooled_by_torch(padded, axes)
        if kind == "max":
            runs.append(Run(function, [x], [dy.shape]))
            wanted.append(y.detach().numpy())
            continue
        saved = kind == "max_backward_saved"
        runs.append(Run(function, [dy, winners if saved else x], [x.shape]))
        (gradient,) = torch.autograd.grad(y, padded, torch.from_numpy(dy).double())
        wanted.append(gradient.numpy())
    for case, exact, (output,) in zip(cases, wanted, run_kernels(runs, target), strict=True):
        if case[0] == "max":
            assert np.array_equal(output, exact.astype("float32"), equal_nan=True), case
        else:
            assert largest_error(output, exact) < 1e-6, case


def pooled_by_torch(x, axes):
    """Return max pooling and the winning taps; the data are padded as far as the windows reach."""
    shape = [x.shape[0], *(axis.number for axis in axes)]
    axes = [Windows(1, 1, 1, 0, 1)] * (3 - len(axes)) + list(axes)
    x = x.reshape(x.shape[0], *(axis.extent for axis in axes))
    behind = [max(0, axis.length - axis.before - axis.extent) for axis in axes]
    pads = [
        p for axis, far in zip(axes[::-1], behind[::-1], strict=True) for p in (axis.before, far)
    ]
    padded = torch.nn.functional.pad(x, pads, value=-float("inf"))
    y, at = torch.nn.functional.max_pool3d(
        padded[None],
        [axis.size for axis in axes],
        [axis.stride for axis in axes],
        0,
        [axis.dilation for axis in axes],
        return_indices=True,
    )
    numbers = (slice(None), *(slice(axis.number) for axis in axes))
    y, at = y[0][numbers], at[0][numbers].numpy()
    tap = 0
    for i, (axis, place) in enumerate(
        zip(axes, np.unravel_index(at, padded.shape[1:]), strict=True)
    ):
        start = np.arange(axis.number).reshape([-1 if i == k else 1 for k in range(3)])
        tap = tap * axis.size + (place - start * axis.stride) // axis.dilation
    return y.reshape(shape), tap.astype("int8").reshape(shape)


def shares(windows, include_pad):
    """Return the weight of each element in the average of each window."""
    parts = np.zeros((windows.number, windows.extent))
    for o in range(windows.number):
        start = o * windows.stride - windows.before
        first = start if include_pad else max(start, 0)
        end = windows.extent + (windows.after if include_pad else 0)
        last = min(start + windows.size, end)
        parts[o, max(start, 0) : start + windows.size] = 1 / max(last - first, 1)
    return parts


def average(x, axes, include_pad):
    for axis, windows in enumerate(axes, 1):
        x = np.moveaxis(np.tensordot(x, shares(windows, include_pad), (axis, 1)), -1, axis)
    return x


def average_gradient(dy, axes, include_pad):
    for axis, windows in enumerate(axes, 1):
        dy = np.moveaxis(np.tensordot(dy, shares(windows, include_pad), (axis, 0)), -1, axis)
    return dy


@st.composite
def windows(draw, sizes, largest=40, dilated=False):
    size, stride = draw(sizes), draw(st.integers(1, 4))
    dilation = draw(st.integers(1, 2)) if dilated else 1
    reach = (size - 1) * dilation + 1
    before, after = draw(st.integers(0, size - 1)), draw(st.integers(0, size - 1))
    extent = draw(st.integers(max(1, reach - before - after), largest))
    number = (extent + before + after - reach) // stride + 1
    # ceil_mode adds a window only if it contains an element.
    if draw(st.booleans()) and number * stride - before < extent:
        number += 1
    while (number - 1) * stride - before >= extent:
        number -= 1
    return Windows(extent, size, stride, before, number, after, dilation)


@st.composite
def case(draw):
    kind = draw(st.sampled_from(KINDS))
    dilated = not kind.startswith("avg")
    axes = st.tuples(
        windows(st.integers(1, 5), dilated=dilated), windows(st.integers(1, 5), dilated=dilated)
    )
    of_volume = st.tuples(*[windows(st.integers(1, 3), 12, dilated)] * 3)
    return (
        kind,
        draw(st.integers(1, 40)),
        draw(st.one_of(axes, axes, of_volume).filter(lambda f: all(a.has_elements() for a in f))),
        draw(st.booleans()),
        # Negative infinity is excluded: PyTorch's data are padded with it.
        "plain" if "avg" in kind else draw(st.sampled_from(["plain", "few", "nan"])),
    )


@each_target
def test_windows_of_resnet_and_others(target):
    overlapping, halving = Windows(30, 3, 2, 1, 15, 1), Windows(32, 2, 2, 0, 16)
    sliding, long = Windows(37, 3, 1, 1, 37, 1), Windows(37, 5, 3, 2, 13, 2)
    pairs = [(overlapping, overlapping), (halving, halving), (long, sliding)]
    check([(kind, 5, pair, pair[0] is long, "plain") for pair in pairs for kind in KINDS], target)


@each_target
def test_volumes_and_dilation(target):
    small, wide = Windows(6, 2, 2, 0, 3), Windows(21, 3, 2, 1, 11, 1)
    far, thrice = Windows(23, 3, 2, 1, 10, 1, 2), Windows(24, 3, 3, 0, 8)
    triples = [(small, wide, wide), (thrice, small, thrice)]
    check(
        [(kind, 3, triple, triple[0] is small, "plain") for triple in triples for kind in KINDS],
        target,
    )
    check([(kind, 3, (far, far), False, "few") for kind in KINDS if "max" in kind], target)


@each_target
def test_bands_and_large_tensors(target, monkeypatch):
    """Planes are divided into several bands, and gradients of whole lines are stored past the
    caches."""
    cpu = CPU.of(target)
    reductions = replace(cpu.tuning.reductions, pool_band=4096)
    cpu = replace(cpu, tuning=replace(cpu.tuning, reductions=reductions))
    monkeypatch.setattr(streams, "LARGE", 2)
    overlapping, halving = Windows(48, 3, 2, 1, 24, 1), Windows(32, 2, 2, 0, 16)
    sliding, long = Windows(64, 3, 1, 1, 64, 1), Windows(53, 5, 3, 2, 18, 2)
    far, padded = Windows(48, 3, 2, 2, 24, 2, 2), Windows(16, 5, 1, 4, 20, 4)
    sparse, deep = Windows(41, 2, 4, 0, 11), Windows(9, 2, 1, 1, 10, 1)
    cases = [
        (overlapping, overlapping),
        (halving, sliding),
        (long, overlapping),
        (sliding, long),
        (padded, halving),
        (sparse, halving),
        (sliding, overlapping, halving),
        (deep, halving, padded),
    ]
    plans = [pool_plan(Pool(1, axes[:-1], axes[-1]), cpu) for axes in cases]
    assert sum(plan.bands > 1 for plan in plans) >= 5
    of_all = [(kind, 3, case, case[0] is long, "plain") for case in cases for kind in KINDS]
    of_maxima = [
        (kind, 2, (far, overlapping), False, numbers)
        for kind in KINDS
        if "max" in kind
        for numbers in ("few", "nan")
    ]
    check(of_all + of_maxima, target, cpu)


@each_target
@pytest.mark.parametrize("least", [2, 40_000, 1 << 40])
def test_a_symbolic_batch_chooses_the_stores(target, least, monkeypatch):
    """Past the caches if the tensors are large when the kernel is called."""
    monkeypatch.setattr(streams, "LARGE", least)
    overlapping, sliding = Windows(48, 3, 2, 1, 24, 1), Windows(64, 3, 1, 1, 64, 1)
    n = tirx.Var("n", "int32")
    function = max_pool_backward(
        Pool(n, (overlapping,), overlapping),
        [(n, 24, 24), (n, 48, 48), (n, 48, 48)],
        CPU.of(target),
    )
    assert "relax_grad_stream_" in function.script()
    kinds = [kind for kind in KINDS if "backward" in kind]
    pairs = [(overlapping, overlapping), (sliding, overlapping)]
    check(
        [(kind, number, p, True, "plain") for kind in kinds for p in pairs for number in (1, 7)],
        target,
    )


@each_target
def test_ties_infinities_and_nan(target):
    rows, columns = Windows(12, 3, 2, 0, 5), Windows(39, 3, 1, 0, 37)
    kinds = ["max", "max_backward", "max_backward_saved"]
    numbers = ["few", "infinite", "nan"]
    check([(kind, 7, (rows, columns), False, n) for kind in kinds for n in numbers], target)


@each_target
def test_padding_never_wins(target):
    """If all elements of a window are negative infinity, the first one in bounds wins."""
    axis = Windows(3, 3, 2, 1, 2, 1)
    function = max_pool_backward(
        Pool(1, (axis,), axis), [(1, 2, 2), (1, 3, 3), (1, 3, 3)], CPU.of(target)
    )
    dy = np.array([[[1, 2], [3, 4]]], "float32")
    x = np.full((1, 3, 3), -np.inf, "float32")
    ((result,),) = run_kernels([Run(function, [dy, x], [x.shape])], target)
    assert result.tolist() == [[[1, 2, 0], [3, 4, 0], [0, 0, 0]]]


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
