"""Weight gradients of convolutions of few input channels against PyTorch in float64."""

from __future__ import annotations

import pytest
from convolutions import check_weight_gradients, convolutions, draw_inputs
from hypothesis import given
from machines import Run, each_target, run_kernels
from sweep import at_length, batches
from tvm import tirx

from relax_grad.cpu.kernel.conv._weight_plan import stem_is_faster
from relax_grad.cpu.kernel.conv.geometry import Conv2d
from relax_grad.cpu.kernel.conv.stem_weight import conv_stem
from relax_grad.cpu.target import CPU

AVX512 = CPU(16, 32, 2)


def test_fits_where_vectors_of_input_channels_would_be_empty():
    assert stem_is_faster(Conv2d(8, 3, 64, (224, 224), (7, 7), (2, 2), (3, 3, 3, 3)), AVX512)
    assert not stem_is_faster(Conv2d(8, 16, 64, (56, 56), (3, 3)), AVX512)
    assert not stem_is_faster(Conv2d(8, 3, 2, (56, 56), (3, 3)), AVX512)
    assert not stem_is_faster(Conv2d(8, 12, 64, (56, 56), (3, 3), groups=4), AVX512)


@each_target
def test_sizes_around_the_tile(target):
    check_weight_gradients(
        conv_stem,
        [
            Conv2d(2, 3, 64, (60, 61), (7, 7), (2, 2), (3, 3, 3, 3)),
            Conv2d(1, 1, 1, (1, 1), (1, 1)),
            Conv2d(3, 5, 37, (20, 9), (2, 3), (3, 1), (0, 4, 5, 1), (2, 3)),
            Conv2d(9, 2, 17, (33, 30), (3, 3), padding=(1, 1, 1, 1)),
        ],
        target,
    )


@each_target
def test_symbolic_batch(target):
    batch = tirx.Var("batch", "int32")
    symbolic = [Conv2d(batch, 3, 20, (30, 31), (3, 3), (2, 1), (1, 1, 1, 1))]
    check_weight_gradients(conv_stem, symbolic, target, batch=(0, 3, 37))


def test_results_do_not_depend_on_the_cores():
    conv = Conv2d(3, 3, 40, (19, 19), (3, 3), padding=(1, 1, 1, 1))
    inputs = draw_inputs(conv)
    runs = [
        Run(conv_stem(conv, CPU(4, 16, cores)), inputs, [conv.weight_shape])
        for cores in (1, 2, 3, 64)
    ]
    results = run_kernels(runs, {"kind": "llvm", "num-cores": 1})
    assert len({result.tobytes() for (result,) in results}) == 1


@pytest.mark.slow
@each_target
@at_length(150)
@given(cases=batches(convolutions(ins=8)))
def test_any_convolution(target, cases):
    check_weight_gradients(conv_stem, cases, target)


@each_target
@at_length(6, batch=3)
@given(cases=batches(convolutions(ins=8), batch=3))
def test_some_convolutions(target, cases):
    check_weight_gradients(conv_stem, cases, target)
