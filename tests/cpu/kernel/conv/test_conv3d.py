"""Convolutions of volumes and both their gradients against PyTorch in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
from convolutions import (
    check_convolutions,
    check_data_gradients,
    check_weight_gradients,
    draw_inputs,
    volumes,
)
from hypothesis import given
from machines import Run, each_target, run_kernels
from sweep import at_length, batches
from tvm import tirx

from relax_grad.cpu.kernel.conv.direct import conv3d, conv3d_backward_data
from relax_grad.cpu.kernel.conv.geometry import ONE, Conv2d, Conv3d, Windows
from relax_grad.cpu.kernel.conv.weight import conv3d_weight
from relax_grad.cpu.target import CPU

SAME = Windows(size=5, kernel=3, stride=1, before=1, after=1, dilation=1)
IMAGES = Conv2d(2, 20, 36, (9, 7), (3, 3), padding=(1, 1, 1, 1))


def check(convs, target, batch=()):
    check_convolutions(conv3d, convs, target, batch)
    check_data_gradients(conv3d_backward_data, convs, target, batch)
    check_weight_gradients(conv3d_weight, convs, target, batch)


def test_volumes_that_reduce_to_convolutions_of_images():
    rows = Conv3d(replace(IMAGES, kernel=(1, 1), padding=(0, 0, 0, 0)), SAME).of_two_axes
    assert (rows.size, rows.kernel, rows.padding) == ((5, 63), (3, 1), (1, 0, 1, 0))
    assert Conv3d(IMAGES, ONE).of_two_axes == IMAGES
    assert Conv3d(IMAGES, SAME).of_two_axes is None
    assert Conv3d(IMAGES, replace(ONE, size=5)).of_two_axes is None


@each_target
def test_volumes_of_networks(target):
    check(
        [
            Conv3d(IMAGES, SAME),
            # Slices outside all windows, and windows outside all slices.
            Conv3d(IMAGES, Windows(size=7, kernel=2, stride=4, before=3, after=6, dilation=1)),
            Conv3d(IMAGES, Windows(size=6, kernel=3, stride=2, before=2, after=2, dilation=2)),
            Conv3d(replace(IMAGES, groups=4), replace(ONE, size=4)),
            Conv3d(Conv2d(1, 130, 40, (2, 2), (2, 2), (2, 2)), replace(SAME, stride=2)),
        ],
        target,
    )


@each_target
def test_symbolic_batch(target):
    symbolic = replace(IMAGES, batch=tirx.Var("batch", "int32"))
    check([Conv3d(symbolic, SAME)], target, batch=(0, 1, 3))


def test_weight_gradients_do_not_depend_on_the_cores():
    conv = Conv3d(replace(IMAGES, in_channels=70), SAME)
    inputs = draw_inputs(conv)
    runs = [
        Run(conv3d_weight(conv, CPU(4, 16, cores)), inputs, [conv.weight_shape])
        for cores in (1, 2, 3, 64)
    ]
    results = run_kernels(runs, {"kind": "llvm", "num-cores": 1})
    assert len({result.tobytes() for (result,) in results}) == 1


@pytest.mark.slow
@each_target
@at_length(100)
@given(cases=batches(volumes()))
def test_any_volumes(target, cases):
    check(cases, target)


@each_target
@at_length(4, batch=2)
@given(cases=batches(volumes(), batch=2))
def test_some_volumes(target, cases):
    check(cases, target)
