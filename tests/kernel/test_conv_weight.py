"""Weight gradients of convolutions against PyTorch in float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import Run, at, each_target, largest_error, run_kernels
from sweep import at_length, batches
from tvm import tirx

from relax_grad.kernel._convolution import Conv2d
from relax_grad.kernel.conv_weight import conv_weight
from relax_grad.target import CPU

RNG = np.random.default_rng(0)


def check(convs, target, **extents):
    """Compare gradients, compiled together, with those of PyTorch in float64."""
    runs = []
    for conv in convs:
        shapes = [at(shape, extents) for shape in (conv.out_shape, conv.data_shape)]
        arrays = [RNG.normal(size=shape).astype("float32") for shape in shapes]
        runs.append(Run(conv_weight(conv, CPU.of(target)), arrays, [conv.weight_shape]))
    results = run_kernels(runs, target)
    for conv, run, (found,) in zip(convs, runs, results, strict=True):
        assert largest_error(found, expected(conv, *run.inputs)) < 4e-6, conv


def expected(conv, output_grad, data):
    """Return the gradient as PyTorch computes it in float64."""
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


@each_target
def test_sizes_around_the_tile(target):
    check(
        [
            Conv2d(2, 16, 8, (9, 9), (3, 3), padding=(1, 1, 1, 1)),
            Conv2d(3, 40, 30, (7, 5), (1, 1)),
            Conv2d(1, 1, 1, (1, 1), (1, 1)),
            Conv2d(2, 33, 29, (12, 11), (1, 1), strides=(2, 3)),
            Conv2d(1, 5, 3, (6, 40), (5, 31), padding=(0, 15, 4, 3)),
            Conv2d(2, 3, 20, (30, 31), (7, 7), strides=(2, 2), padding=(3, 3, 3, 3)),
            Conv2d(2, 24, 36, (8, 8), (3, 3), padding=(1, 1, 1, 1), groups=4),
            Conv2d(2, 20, 10, (13, 14), (2, 3), (2, 4), (0, 1, 2, 3), (3, 2)),
        ],
        target,
    )


@each_target
def test_images_of_many_chunks(target):
    check(
        [
            Conv2d(2, 18, 9, (120, 60), (3, 3), padding=(1, 1, 1, 1)),
            Conv2d(2, 20, 9, (113, 97), (1, 1)),
            Conv2d(60, 18, 9, (17, 9), (3, 2), strides=(2, 2)),
        ],
        target,
    )


@each_target
def test_symbolic_batch(target):
    batch = tirx.Var("batch", "int32")
    symbolic = [
        Conv2d(batch, 18, 9, (8, 9), (3, 3), padding=(1, 1, 1, 1)),
        Conv2d(batch, 18, 9, (8, 9), (1, 1)),
        Conv2d(batch, 3, 9, (70, 71), (3, 3), strides=(2, 1)),
    ]
    for size in (0, 3, 37):
        check(symbolic, target, batch=size)


def test_results_do_not_depend_on_the_cores():
    """The sums are those of one core, bit by bit, whatever number of them the work is divided for."""
    conv = Conv2d(3, 70, 40, (9, 9), (3, 3), padding=(1, 1, 1, 1))
    arrays = [
        RNG.normal(size=shape).astype("float32") for shape in (conv.out_shape, conv.data_shape)
    ]
    target = {"kind": "llvm", "num-cores": 1}
    cpu = CPU.of(target)
    runs = [
        Run(conv_weight(conv, CPU(cpu.lanes, cpu.registers, cores)), arrays, [conv.weight_shape])
        for cores in (1, 2, 3, 64)
    ]
    first, *others = (result.tobytes() for (result,) in run_kernels(runs, target))
    assert all(other == first for other in others)


@st.composite
def convolutions(draw):
    groups = draw(st.sampled_from([1, 1, 1, 2, 3]))
    axes = [draw(axis()) for _ in range(2)]
    size, kernel, strides, before, after, dilation = zip(*axes, strict=True)
    return Conv2d(
        draw(st.integers(1, 5)),
        groups * draw(st.integers(1, 50)),
        groups * draw(st.integers(1, 40)),
        size,
        kernel,
        strides,
        (*before, *after),
        dilation,
        groups,
    )


@st.composite
def axis(draw):
    """Size, kernel, stride, padding before and behind, dilation."""
    kernel, dilation = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    before, after = draw(st.integers(0, 4)), draw(st.integers(0, 4))
    least = max(1, (kernel - 1) * dilation + 1 - before - after)
    size = draw(st.integers(least, least + 20))
    return size, kernel, draw(st.sampled_from([1, 1, 2, 3, 5, 17])), before, after, dilation


@pytest.mark.slow
@each_target
@at_length(1000)
@given(cases=batches(convolutions()))
def test_any_convolution(target, cases):
    check(cases, target)


@each_target
@at_length(10, batch=10)
@given(cases=batches(convolutions(), batch=10))
def test_some_convolutions(target, cases):
    check(cases, target)
