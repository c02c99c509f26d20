"""Convolutions and their data gradients against sums over taps in float64."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import Run, at, each_target, largest_error, run_kernels
from sweep import at_length, batches
from tvm import tirx

from relax_grad.cpu.kernel.conv._direct_plan import direct_plan
from relax_grad.cpu.kernel.conv.direct import conv2d, conv2d_backward_data
from relax_grad.cpu.kernel.conv.gathering import Axis, Gathering
from relax_grad.cpu.kernel.conv.geometry import Conv2d, Windows
from relax_grad.cpu.target import CPU

pytestmark = pytest.mark.core

RNG = np.random.default_rng(0)


def windows(conv, padded, tap):
    """Return the part of padded data that a tap reads, one element for each window."""
    rows, columns = (
        slice(k * d, k * d + (n - 1) * s + 1, s)
        for k, d, n, s in zip(tap, conv.dilation, conv.out_size, conv.strides, strict=True)
    )
    return padded[..., rows, columns]


def grouped(conv, images):
    """Reshape images ``[n, c, h, w]`` to ``[n, g, c / g, h, w]``."""
    number, channels, *size = images.shape
    return images.reshape(number, conv.groups, channels // conv.groups, *size)


def padded_zeros(conv, batch):
    top, left, bottom, right = conv.padding
    height, width = conv.size
    shape = (batch, conv.in_channels, height + top + bottom, width + left + right)
    return np.zeros(shape), (..., slice(top, top + height), slice(left, left + width))


def wanted_result(conv, data, weight):
    padded, inside = padded_zeros(conv, data.shape[0])
    padded[inside] = data
    weight = weight.astype("float64").reshape(conv.groups, -1, *weight.shape[1:])
    total = sum(
        np.einsum(
            "ngchw,goc->ngohw", grouped(conv, windows(conv, padded, tap)), weight[(..., *tap)]
        )
        for tap in itertools.product(*map(range, conv.kernel))
    )
    return total.reshape(data.shape[0], conv.out_channels, *conv.out_size)


def wanted_data_gradient(conv, output_grad, weight):
    padded, inside = padded_zeros(conv, output_grad.shape[0])
    weight = weight.astype("float64").reshape(conv.groups, -1, *weight.shape[1:])
    for tap in itertools.product(*map(range, conv.kernel)):
        part = np.einsum("ngohw,goc->ngchw", grouped(conv, output_grad), weight[(..., *tap)])
        read = windows(conv, padded, tap)
        read += part.reshape(read.shape)
    return padded[inside]


def check(convolutions, target, cores=2, sizes=None, **extents):
    """Compare the forward and data gradient kernels of convolutions, compiled together, with the
    sums over taps; ``sizes`` are of the parts that fit a cache."""
    runs, wanted = [], []
    host = CPU.of(target)
    cpu = CPU(host.lanes, host.registers, cores)
    if sizes is not None:
        tuning = cpu.tuning
        tuning = replace(tuning, convolutions=replace(tuning.convolutions, **sizes))
        cpu = replace(cpu, tuning=tuning)
    for conv in convolutions:
        data, weight, out = (
            RNG.normal(size=at(shape, extents)).astype("float32")
            for shape in (conv.data_shape, conv.weight_shape, conv.out_shape)
        )
        runs.append(Run(conv2d(conv, cpu), [data, weight], [out.shape]))
        wanted.append(wanted_result(conv, data, weight))
        runs.append(Run(conv2d_backward_data(conv, cpu), [out, weight], [data.shape]))
        wanted.append(wanted_data_gradient(conv, out, weight))
    for i, (result,) in enumerate(run_kernels(runs, target)):
        assert largest_error(result, wanted[i]) < 5e-6, (
            runs[i].function.attrs,
            convolutions[i // 2],
        )


def test_axis_of_a_data_gradient():
    # With a window of 3 and stride 2, only the middle tap reads every other element.
    axis = Axis.backward(Windows(size=7, kernel=3, stride=2, before=1, after=1, dilation=1))
    assert [taps.number for taps in axis.phases] == [1, 2]
    assert [taps.offsets for taps in axis.phases] == [[0], [0, 1]]
    assert [(taps.first, taps.step) for taps in axis.phases] == [(1, 2), (0, 2)]
    assert (axis.count(0), axis.count(1)) == (4, 3)
    # With stride 2 and dilation 2, no tap reads odd elements.
    dilated = Axis.backward(Windows(size=8, kernel=3, stride=2, before=0, after=0, dilation=2))
    assert [taps.number for taps in dilated.phases] == [3, 0]


@each_target
def test_convolutions_of_networks(target):
    same = (1, 1, 1, 1)
    check(
        [
            Conv2d(2, 3, 64, (33, 29), (7, 7), (2, 2), (3, 3, 3, 3)),
            Conv2d(2, 40, 72, (7, 7), (3, 3), padding=same),
            Conv2d(3, 70, 33, (7, 7), (1, 1)),
            Conv2d(1, 128, 64, (16, 16), (1, 1)),
            Conv2d(2, 16, 40, (15, 15), (1, 1), (2, 2)),
            Conv2d(2, 8, 16, (32, 32), (16, 16), (16, 16)),
            Conv2d(1, 24, 36, (9, 40), (5, 1), (1, 3), (0, 2, 3, 1), (2, 1), 2),
            Conv2d(5, 300, 20, (2, 2), (3, 3), padding=same),
            Conv2d(1, 250, 96, (4, 5), (3, 3), padding=same),
        ],
        target,
    )


@each_target
def test_symbolic_batch(target):
    batch = tirx.Var("batch", "int32")
    convolutions = [
        Conv2d(batch, 20, 40, (7, 7), (3, 3), padding=(1, 1, 1, 1)),
        Conv2d(batch, 16, 24, (9, 9), (3, 3), (2, 2), (0, 1, 1, 0)),
        Conv2d(batch, 12, 20, (5, 6), (3, 3), groups=4),
    ]
    check(convolutions, target, batch=5)
    check(convolutions[:1], target, batch=0)


#: Convolutions whose data, or whose gradients of the result, are copied in parts of their channels.
IN_PARTS = [
    Conv2d(5, 440, 40, (9, 9), (3, 3), (2, 2), (1, 1, 1, 1)),
    Conv2d(4, 40, 480, (6, 7), (3, 3), padding=(2, 2, 2, 2), dilation=(2, 2)),
]


def test_parts_of_the_channels():
    wide, short = CPU(16, 32, 2), CPU(8, 16, 2)
    ways = Gathering.forward, Gathering.backward
    for conv, gathering in zip(IN_PARTS, ways, strict=True):
        own = direct_plan(gathering(conv), wide)
        assert own.source_parts > 1
        assert own.tile_images == 2
        # No tile of six pixels has rows of two images.
        assert direct_plan(gathering(conv), short).source_parts == 1
    # A single image has no other one to share its tiles with.
    assert direct_plan(Gathering.forward(replace(IN_PARTS[0], batch=1)), wide).source_parts == 1


@each_target
def test_channels_in_parts(target):
    batch = tirx.Var("batch", "int32")
    check([*IN_PARTS, replace(IN_PARTS[0], batch=batch)], target, batch=3)


@st.composite
def axes(draw):
    """Draw the extent, kernel, stride, padding and dilation of an axis with at least one window."""
    kernel, dilation = draw(st.integers(1, 7)), draw(st.integers(1, 3))
    stride = draw(st.sampled_from([1, 1, 2, 3, 4]))
    before, after = draw(st.integers(0, 4)), draw(st.integers(0, 4))
    reach = (kernel - 1) * dilation + 1
    size = draw(st.integers(max(1, reach - before - after), 40))
    return size, kernel, stride, before, after, dilation


@st.composite
def convolutions(draw):
    rows, columns = draw(axes()), draw(axes())
    size, kernel, strides, before, after, dilation = zip(rows, columns, strict=True)
    groups = draw(st.sampled_from([1, 1, 1, 2, 3]))
    channels = st.integers(1, 70 // groups)
    return Conv2d(
        draw(st.integers(1, 3)),
        draw(channels) * groups,
        draw(channels) * groups,
        size,
        kernel,
        strides,
        (*before, *after),
        dilation,
        groups,
    )


@pytest.mark.slow
@each_target
@at_length(100, 10)
@given(cases=batches(convolutions(), 10))
def test_any_convolution(target, cases):
    check(cases, target, cores=1 + len(cases) % 3)


@each_target
@at_length(8, 4)
@given(cases=batches(convolutions(), 4))
def test_some_convolutions(target, cases):
    check(cases, target)


@st.composite
def of_short_rows(draw):
    """Draw a convolution of at most 7 x 7 windows."""
    axes = []
    for _ in range(2):
        kernel, dilation, stride = (draw(st.integers(1, most)) for most in (5, 2, 3))
        before, after = draw(st.integers(0, 3)), draw(st.integers(0, 3))
        reach = (kernel - 1) * dilation + 1
        size = (draw(st.integers(1, 7)) - 1) * stride + reach - before - after
        axes.append((max(1, size, reach - before - after), kernel, stride, before, after, dilation))
    size, kernel, strides, before, after, dilation = zip(*axes, strict=True)
    batch, *channels = draw(st.integers(4, 9)), draw(st.integers(16, 70)), draw(st.integers(16, 70))
    return Conv2d(batch, *channels, size, kernel, strides, (*before, *after), dilation)


@each_target
@at_length(18, 6)
@given(cases=batches(of_short_rows(), 6))
def test_some_convolutions_in_small_caches(target, cases):
    check(cases, target, sizes={"source": 4096, "weights": 512, "panel": 2048})
