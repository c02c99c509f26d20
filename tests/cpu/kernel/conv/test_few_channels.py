"""Convolutions and data gradients of few channels against PyTorch in float64."""

from __future__ import annotations

import pytest
from convolutions import check_convolutions, check_data_gradients, convolutions
from hypothesis import given
from machines import each_target
from sweep import at_length, batches
from tvm import tirx

from relax_grad.cpu.kernel.conv._few_channels_plan import is_faster, is_supported
from relax_grad.cpu.kernel.conv.few_channels import (
    conv_few_channels,
    conv_few_channels_backward_data,
)
from relax_grad.cpu.kernel.conv.gathering import Gathering
from relax_grad.cpu.kernel.conv.geometry import Conv2d
from relax_grad.cpu.target import CPU

AVX512 = CPU(16, 32, 2)
SAME = (1, 1, 1, 1)


def check(convs, target, batch=()):
    forward = [conv for conv in convs if is_supported(Gathering.forward(conv))]
    backward = [conv for conv in convs if is_supported(Gathering.backward(conv))]
    check_convolutions(conv_few_channels, forward, target, batch)
    check_data_gradients(conv_few_channels_backward_data, backward, target, batch)


def test_fits_where_vectors_of_channels_would_be_empty():
    stem = Conv2d(8, 3, 64, (224, 224), (7, 7), (2, 2), (3, 3, 3, 3))
    assert is_faster(Gathering.backward(stem), AVX512)
    assert not is_faster(Gathering.forward(stem), AVX512)
    grouped = Conv2d(8, 128, 128, (56, 56), (3, 3), padding=SAME, groups=32)
    assert is_faster(Gathering.forward(grouped), AVX512)
    assert not is_faster(Gathering.forward(Conv2d(8, 128, 128, (7, 7), (3, 3), groups=32)), AVX512)
    assert not is_supported(Gathering.backward(Conv2d(8, 3, 64, (224, 224), (4, 4), (4, 4))))


@each_target
def test_sizes_around_the_tile(target):
    check(
        [
            Conv2d(2, 3, 20, (30, 31), (7, 7), (2, 2), (3, 3, 3, 3)),
            Conv2d(2, 12, 15, (14, 13), (3, 3), padding=SAME, groups=3),
            Conv2d(1, 5, 8, (9, 70), (3, 5), (2, 1), (0, 2, 4, 1), (1, 2)),
            Conv2d(2, 4, 6, (20, 24), (1, 1), (1, 2)),
            Conv2d(1, 1, 1, (1, 1), (1, 1)),
            Conv2d(1, 40, 2, (300, 40), (3, 3), padding=SAME),
        ],
        target,
    )


@each_target
def test_symbolic_batch(target):
    symbolic = Conv2d(tirx.Var("batch", "int32"), 8, 12, (9, 19), (3, 3), padding=SAME, groups=2)
    check([symbolic], target, batch=(0, 1, 5))


@pytest.mark.slow
@each_target
@at_length(100)
@given(cases=batches(convolutions(12, 12, (1, 2, 3), strides=(1, 2))))
def test_any_convolution(target, cases):
    check(cases, target)


@each_target
@at_length(6, batch=3)
@given(cases=batches(convolutions(12, 12, (1, 2, 3), strides=(1, 2)), batch=3))
def test_some_convolutions(target, cases):
    check(cases, target)
