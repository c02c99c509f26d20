"""Weight gradients of convolutions against PyTorch in float64."""

from __future__ import annotations

import pytest
from convolutions import check_weight_gradients, convolutions, draw_inputs
from hypothesis import given
from machines import Run, each_target, run_kernels
from sweep import at_length, batches
from tvm import tirx

from relax_grad.cpu.kernel.conv.geometry import Conv2d
from relax_grad.cpu.kernel.conv.weight import conv_weight
from relax_grad.cpu.target import CPU


@each_target
def test_sizes_around_the_tile(target):
    check_weight_gradients(
        conv_weight,
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
    check_weight_gradients(
        conv_weight,
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
    check_weight_gradients(conv_weight, symbolic, target, batch=(0, 3, 37))


def test_results_do_not_depend_on_the_cores():
    """The sums equal those of one core bit by bit, for any number of cores."""
    conv = Conv2d(3, 70, 40, (9, 9), (3, 3), padding=(1, 1, 1, 1))
    arrays = draw_inputs(conv)
    target = {"kind": "llvm", "num-cores": 1}
    cpu = CPU.of(target)
    runs = [
        Run(conv_weight(conv, CPU(cpu.lanes, cpu.registers, cores)), arrays, [conv.weight_shape])
        for cores in (1, 2, 3, 64)
    ]
    first, *others = (result.tobytes() for (result,) in run_kernels(runs, target))
    assert all(other == first for other in others)


GROUPS = (1, 1, 1, 2, 3)


@pytest.mark.slow
@each_target
@at_length(150)
@given(cases=batches(convolutions(groups=GROUPS)))
def test_any_convolution(target, cases):
    check_weight_gradients(conv_weight, cases, target)


@each_target
@at_length(6, batch=3)
@given(cases=batches(convolutions(groups=GROUPS), batch=3))
def test_some_convolutions(target, cases):
    check_weight_gradients(conv_weight, cases, target)
