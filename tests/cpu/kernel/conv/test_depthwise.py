"""Depthwise convolutions and their data gradients against PyTorch in float64."""

from __future__ import annotations

import pytest
from convolutions import check_convolutions, check_data_gradients, depthwise_convolutions
from hypothesis import given
from machines import each_target
from sweep import at_length, batches
from tvm import tirx

from relax_grad.cpu.kernel.conv._depthwise_plan import Gather
from relax_grad.cpu.kernel.conv.depthwise import depthwise, depthwise_backward_data
from relax_grad.cpu.kernel.conv.geometry import Conv2d, Windows

KERNELS = [(depthwise, check_convolutions), (depthwise_backward_data, check_data_gradients)]
each_kernel = pytest.mark.parametrize(
    ("kernel", "check"), KERNELS, ids=[kernel.__name__ for kernel, _ in KERNELS]
)


def test_gather_of_a_strided_convolution():
    windows = Windows(size=7, kernel=3, stride=2, before=1, after=1, dilation=1)
    forward, backward = Gather.forward(windows), Gather.backward(windows)
    assert forward == Gather(7, 4, 1, 2, (((0, -1), (1, 0), (2, 1)),))
    assert backward == Gather(4, 7, 2, 1, (((1, 0),), ((0, 1), (2, 0))))
    assert (forward.first, forward.units, forward.span(4)) == (-1, 4, 9)
    assert (backward.first, backward.units, backward.span(4)) == (0, 4, 5)


@each_kernel
@each_target
def test_sizes_around_the_vector(target, kernel, check):
    check(
        kernel,
        [
            Conv2d(3, 20, 20, (7, 7), (3, 3), padding=(1, 1, 1, 1), groups=20),
            Conv2d(2, 17, 17, (19, 18), (3, 3), (2, 2), (1, 1, 1, 1), groups=17),
            Conv2d(2, 2, 2, (1, 1), (1, 1), groups=2),
            Conv2d(1, 16, 16, (12, 9), (2, 5), (3, 1), (0, 6, 4, 0), (1, 2), groups=16),
        ],
        target,
    )


@each_kernel
@each_target
def test_images_of_many_chunks(target, kernel, check):
    conv = Conv2d(2, 3, 3, (70, 120), (3, 3), (2, 1), (1, 1, 1, 1), groups=3)
    check(kernel, [conv], target)


@each_kernel
@each_target
def test_symbolic_batch(target, kernel, check):
    batch = tirx.Var("batch", "int32")
    symbolic = [
        Conv2d(batch, 20, 20, (7, 7), (3, 3), padding=(1, 1, 1, 1), groups=20),
        Conv2d(batch, 2, 2, (33, 33), (3, 3), groups=2),
    ]
    check(kernel, symbolic, target, batch=(0, 3, 37))


STRIDES = (1, 1, 2, 3, 4)


@pytest.mark.slow
@each_kernel
@each_target
@at_length(150)
@given(cases=batches(depthwise_convolutions(strides=STRIDES)))
def test_any_convolution(target, kernel, check, cases):
    check(kernel, cases, target)


@each_kernel
@each_target
@at_length(6, batch=3)
@given(cases=batches(depthwise_convolutions(strides=(1, 2), kernels=3), batch=3))
def test_some_convolutions(target, kernel, check, cases):
    check(kernel, cases, target)
