"""The gradient of attention against PyTorch's differentiation in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from attentions import (
    DROPPED,
    HEADS_FIRST,
    MASKS,
    SIZE_PARAMS,
    TURNED,
    WIDE,
    drawn,
    in_orders,
    reference,
    sized,
    with_generator,
)
from hypothesis import given
from machines import Run, at, each_target, largest_error, makers, run_kernels
from sweep import at_length, batches

from relax_grad.cpu.kernel.attention.backward import attention_backward
from relax_grad.cpu.target import CPU
from relax_grad.cpu.tuning import EARLY_AVX512

torch = pytest.importorskip("torch", reason="PyTorch is not installed: nothing to compare with")

RNG = np.random.default_rng(0)


def gradients(of, inputs, output_grad):
    """Return the result, the numbers saved for the gradient, and the gradients of queries, keys and
    values."""
    leaves = [torch.from_numpy(array).double().requires_grad_() for array in inputs]
    result, sums = reference(of, *leaves)
    grads = torch.autograd.grad(result, leaves[:3], torch.from_numpy(output_grad).double())
    return result.detach(), sums.detach(), [grad.numpy() for grad in grads]


def run_of(of, shapes, names, cpu, takes_sums, numbers=(), turned=()):
    """Return the run of the kernel for random tensors, and the wanted gradients; tensors with these
    numbers have the heads before the positions, or before the features."""
    arrays = [RNG.normal(size=at(shape, names)).astype("float32") for shape in shapes[:-1]]
    *inputs, output_grad = arrays
    result, sums, wanted = gradients(of, inputs, output_grad)
    result, sums = (tensor.numpy().astype("float32") for tensor in (result, sums))
    places = [2, 3, 4, 1, 0]  # of queries, keys, values, the result and its gradient
    operands = {places[i] for i in numbers if i < 5}
    grads = {i - 5 for i in numbers if i >= 5}
    keys, of_keys = ({3} if 1 in turned else set()), ({1} if 6 in turned else set())
    taken = with_generator(of, in_orders([output_grad, result, *inputs], operands, keys), 5)
    taken += [sums] if takes_sums else []
    function = attention_backward(
        of,
        [shapes[-2], shapes[-2], *shapes[:-2]],
        cpu,
        takes_sums=takes_sums,
        exchanged=[*sorted(operands), *(len(taken) + i for i in sorted(grads))],
        turned=[*keys, *(len(taken) + i for i in of_keys)],
    )
    outputs = in_orders(inputs[:3], grads, of_keys)
    wanted = in_orders(wanted, grads, of_keys)
    return Run(function, taken, [array.shape for array in outputs]), wanted


def check(cases, target, **properties):
    """Compare kernels of ``(sizes, symbolic, bias, attrs, takes_sums)``, compiled together, with
    PyTorch; a case may also have the numbers of tensors with the heads before the positions, and of
    those with the heads before the features. The makers of the processor take turns."""
    cpus = makers(replace(CPU.of(target), **{"cores": 2, **properties}))
    made = [
        run_of(*sized(sizes, symbolic, bias, **attrs), cpus[i % len(cpus)], takes_sums, *orders)
        for i, (sizes, symbolic, bias, attrs, takes_sums, *orders) in enumerate(cases)
    ]
    results = run_kernels([run for run, _ in made], target)
    for case, got, (_, wanted) in zip(cases, results, made, strict=True):
        for name, own, expected in zip("qkv", got, wanted, strict=True):
            assert largest_error(own, expected) < 4e-6, (case, name)


@each_target
@pytest.mark.parametrize("sizes", SIZE_PARAMS, ids=str)
def test_sizes(target, sizes):
    symbolic = ["queries", "keys"] if sizes[2] > 128 else ["batch"]
    check([(sizes, (), None, {}, True), (sizes, symbolic, None, MASKS[1], False)], target)


@each_target
@pytest.mark.parametrize("attrs", MASKS, ids=str)
def test_masks(target, attrs):
    # Every second mask has more queries than keys, and the others fewer.
    sizes = [(1, 131, 70, 2, 1, 5, 7), (1, 70, 131, 1, 1, 7, 5)][MASKS.index(attrs) % 2]
    check([(sizes, (), None, attrs, True)], target)


@each_target
@pytest.mark.parametrize("bias", [(0, 1, 2, 3), (1, 3)], ids=str)
def test_a_bias_is_broadcast(target, bias):
    check([((2, 21, 35, 4, 2, 5, 7), (), bias, MASKS[1], True)], target)


@each_target
def test_dropped_weights(target):
    check([(*case, i % 2 == 0) for i, case in enumerate(DROPPED)], target)


@each_target
@pytest.mark.parametrize("takes_sums", [False, True])
def test_heads_before_positions(target, takes_sums):
    check([(*case, takes_sums, numbers) for *case, numbers in HEADS_FIRST], target)


@each_target
def test_keys_with_heads_before_features(target):
    check([(*case[:4], i % 2 == 0, *case[4:]) for i, case in enumerate(TURNED)], target)


@each_target
def test_wide_tiles(target):
    tuning = replace(CPU.of(target).tuning, attention=EARLY_AVX512.attention)
    check([(*case, i % 2 == 0) for i, case in enumerate(WIDE)], target, tuning=tuning)


#: Sizes whose heads are few for four threads. The blocks of queries of the last ones are too few.
FEW = [(1, 150, 150, 2, 1, 5, 7), (1, 100, 300, 6, 3, 16, 33), (2, 60, 140, 1, 1, 7, 5)]


@each_target
@pytest.mark.parametrize("attrs", MASKS, ids=str)
def test_blocks_are_divided_among_threads_where_heads_are_few(target, attrs):
    check(
        [
            (sizes, (), None, {**attrs, **rate}, takes_sums)
            for sizes, rate, takes_sums in zip(
                FEW, [{"rate": 0.3}, {}, {}], [True, False, True], strict=True
            )
        ],
        target,
        cores=4,
    )


@each_target
def test_a_query_without_keys_has_no_gradient(target):
    of, shapes, names = sized((1, 3, 5, 1, 1, 2, 2), (), (2, 3))
    arrays = [RNG.normal(size=at(shape, names)).astype("float32") for shape in shapes[:-1]]
    *inputs, output_grad = arrays
    inputs[3][0, 0, 1] = -np.inf
    others = [0, 2]
    cpu = CPU.of(target)
    for takes_sums in (False, True):
        function = attention_backward(
            of, [shapes[-2], shapes[-2], *shapes[:-2]], cpu, takes_sums=takes_sums
        )
        result, sums = (tensor.numpy() for tensor in reference(of, *map(torch.from_numpy, inputs)))
        taken = [output_grad, result, *inputs, *([sums] if takes_sums else [])]
        run = Run(function, taken, [array.shape for array in inputs[:3]])
        ((query_grad, key_grad, value_grad),) = run_kernels([run], target)
        assert not query_grad[0, 1].any()
        inputs_of_others = [inputs[0][:, others], *inputs[1:3], inputs[3][:, :, others]]
        small, _, _ = sized((1, 2, 5, 1, 1, 2, 2), (), (2, 3))
        _, _, wanted = gradients(small, inputs_of_others, output_grad[:, others])
        for got, expected in zip(
            (query_grad[:, others], key_grad, value_grad), wanted, strict=True
        ):
            assert largest_error(got, expected) < 1e-6


@each_target
@pytest.mark.parametrize("mask", [-1e9, float(np.finfo("float32").min)])
def test_all_keys_of_a_query_may_be_masked_by_a_finite_number(target, mask):
    """The keys of such a query have equal weights: beside its scores, the logarithm of their number
    has no digit."""
    of, shapes, names = sized((1, 3, 50, 1, 1, 4, 4), ["keys"], (2, 3))  # saves the sums
    *inputs, output_grad = (
        RNG.normal(size=at(shape, names)).astype("float32") for shape in shapes[:-1]
    )
    inputs[0][0, 1], inputs[3][0, 0, 1] = 0, mask
    cpu = CPU.of(target)
    runs = []
    for takes_sums in (False, True):
        function = attention_backward(
            of, [shapes[-2], shapes[-2], *shapes[:-2]], cpu, takes_sums=takes_sums
        )
        result, saved, wanted = gradients(of, inputs, output_grad)
        result, saved = (tensor.numpy().astype("float32") for tensor in (result, saved))
        taken = [output_grad, result, *inputs, *([saved] if takes_sums else [])]
        runs.append(Run(function, taken, [array.shape for array in inputs[:3]]))
    for results in run_kernels(runs, target):
        for own, expected in zip(results, wanted, strict=True):
            assert largest_error(own, expected) < 1e-6


@pytest.mark.slow
@each_target
@at_length(50)
@given(cases=batches(drawn()))
def test_any_size(target, cases):
    check([(*case, i % 2 == 0, numbers) for i, (*case, numbers) in enumerate(cases)], target)
