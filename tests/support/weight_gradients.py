"""Weight gradients of convolutions against PyTorch in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest
import tvm
from hypothesis import strategies as st
from machines import Run, at, largest_error, run_kernels

from relax_grad.kernel._convolution import Conv2d
from relax_grad.target import CPU

RNG = np.random.default_rng(0)


def check_weight_gradients(
    make: Callable, convs: Sequence[Conv2d], target: tvm.target.Target, **extents: int
) -> None:
    """Compare the gradients of kernels, compiled together, with those of PyTorch."""
    runs = [
        Run(make(conv, CPU.of(target)), draw_inputs(conv, extents), [conv.weight_shape])
        for conv in convs
    ]
    results = run_kernels(runs, target)
    for conv, run, (found,) in zip(convs, runs, results, strict=True):
        assert largest_error(found, weight_gradient(conv, *run.inputs)) < 4e-6, conv


def draw_inputs(conv: Conv2d, extents: Mapping[str, int] | None = None) -> list[np.ndarray]:
    """Return a gradient of the result, and data."""
    shapes = [at(shape, extents or {}) for shape in (conv.out_shape, conv.data_shape)]
    return [RNG.normal(size=shape).astype("float32") for shape in shapes]


def weight_gradient(conv: Conv2d, output_grad: np.ndarray, data: np.ndarray) -> np.ndarray:
    """Return the gradient as PyTorch computes it."""
    torch = pytest.importorskip("torch")
    if len(data) == 0:
        return np.zeros(conv.weight_shape)
    top, left, bottom, right = conv.padding
    padded = np.pad(data.astype("float64"), ((0, 0), (0, 0), (top, bottom), (left, right)))
    weight = torch.zeros(conv.weight_shape, dtype=torch.float64, requires_grad=True)
    output = torch.nn.functional.conv2d(
        torch.from_numpy(padded),
        weight,
        stride=conv.strides,
        dilation=conv.dilation,
        groups=conv.groups,
    )
    output.backward(torch.from_numpy(output_grad.astype("float64")))
    return weight.grad.numpy()


@st.composite
def axes(draw, kernels: int = 6, strides: Sequence[int] = (1, 1, 2, 3, 5, 17)):
    """Draw size, kernel, stride, padding before and behind, and dilation."""
    kernel, dilation = draw(st.integers(1, kernels)), draw(st.integers(1, 3))
    before, after = draw(st.integers(0, 4)), draw(st.integers(0, 4))
    least = max(1, (kernel - 1) * dilation + 1 - before - after)
    size = draw(st.integers(least, least + 20))
    return size, kernel, draw(st.sampled_from(strides)), before, after, dilation


@st.composite
def convolutions(draw, ins: int = 50, outs: int = 40, groups: Sequence[int] = (1,), **more):
    """Draw convolutions of any attributes; ``ins`` and ``outs`` are the most channels of a group."""
    number = draw(st.sampled_from(groups))
    columns = zip(*(draw(axes(**more)) for _ in range(2)), strict=True)
    size, kernel, strides, before, after, dilation = columns
    return Conv2d(
        draw(st.integers(1, 5)),
        number * draw(st.integers(1, ins)),
        number * draw(st.integers(1, outs)),
        size,
        kernel,
        strides,
        (*before, *after),
        dilation,
        number,
    )
