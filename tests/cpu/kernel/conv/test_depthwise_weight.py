"""Weight gradients of depthwise convolutions against PyTorch in float64."""

from __future__ import annotations

import pytest
from convolutions import check_weight_gradients, depthwise_convolutions, draw_inputs
from hypothesis import given
from machines import Run, each_target, run_kernels
from sweep import at_length, batches
from tvm import tirx

from relax_grad.cpu.kernel.conv.depthwise_weight import depthwise_weight
from relax_grad.cpu.kernel.conv.geometry import Conv2d
from relax_grad.cpu.target import CPU


@each_target
def test_sizes_around_the_vector(target):
    check_weight_gradients(
        depthwise_weight,
        [
            Conv2d(3, 20, 20, (7, 7), (3, 3), padding=(1, 1, 1, 1), groups=20),
            Conv2d(2, 17, 17, (19, 18), (5, 5), (2, 2), (1, 1, 1, 1), groups=17),
            Conv2d(2, 2, 2, (1, 1), (1, 1), groups=2),
            Conv2d(2, 3, 3, (70, 120), (3, 3), (2, 1), (1, 1, 1, 1), groups=3),
        ],
        target,
    )


@each_target
def test_symbolic_batch(target):
    batch = tirx.Var("batch", "int32")
    symbolic = [
        Conv2d(batch, 20, 20, (7, 7), (3, 3), padding=(1, 1, 1, 1), groups=20),
        Conv2d(batch, 2, 2, (33, 33), (3, 3), groups=2),
    ]
    check_weight_gradients(depthwise_weight, symbolic, target, batch=(0, 3, 37))


def test_results_do_not_depend_on_the_cores():
    conv = Conv2d(5, 5, 5, (33, 33), (3, 3), groups=5)
    inputs = draw_inputs(conv)
    runs = [
        Run(depthwise_weight(conv, CPU(4, 16, cores)), inputs, [conv.weight_shape])
        for cores in (1, 2, 64)
    ]
    results = run_kernels(runs, {"kind": "llvm", "num-cores": 1})
    assert len({result.tobytes() for (result,) in results}) == 1


@pytest.mark.slow
@each_target
@at_length(150)
@given(cases=batches(depthwise_convolutions()))
def test_any_convolution(target, cases):
    check_weight_gradients(depthwise_weight, cases, target)


@each_target
@at_length(6, batch=3)
@given(cases=batches(depthwise_convolutions(kernels=3), batch=3))
def test_some_convolutions(target, cases):
    check_weight_gradients(depthwise_weight, cases, target)
