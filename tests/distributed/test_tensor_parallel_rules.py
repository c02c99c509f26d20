"""The rules of the pass TensorParallel for operators, on their samples: each axis that the pass
lets divide, against the whole."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import tvm
from thread_workers import thread_workers
from tvm import relax

from relax_grad.distributed import along, join_values, shard_values
from relax_grad.distributed.transform import TensorParallel
from relax_grad.distributed.transform._labels import RULES, SHAPES
from relax_grad.testing import _program
from relax_grad.testing._arguments import resolve
from relax_grad.testing.samples import sampled_operators, samples
from relax_grad.transform import Gradient

OPERATORS = sorted({*RULES, *SHAPES} & set(sampled_operators()))

#: Operators of which a check is part of each run of the tests.
ALWAYS = ("relax.sum",)


def programs_of(name):
    """Yield the module of each sample, its arguments, and the divided modules with their
    annotations and workers."""
    for sample in samples(name):
        _, function = resolve(sample.function or sample.op)
        arguments = _program.make_arguments(sample.inputs, None, {})
        program = _program.first_order(function, arguments, sample.attrs, np.random.default_rng(0))
        floats = [argument.name for argument in program.arguments if argument.is_float]
        divided = []
        for argument in program.arguments:
            for axis, extent in enumerate(argument.value.shape):
                workers = next((count for count in (2, 3, 5) if extent % count == 0), None)
                if workers is None or extent == 0:
                    continue
                pass_ = TensorParallel("main", {argument.name: along(axis)}, workers)
                with contextlib.suppress(ValueError):
                    module = pass_(program.module)
                    divided.append((module, pass_.shards_of(program.module), workers))
        if divided:
            yield program, floats, divided


@pytest.mark.parametrize(
    "name",
    [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.slow) for name in OPERATORS],
)
def test_a_divided_axis_gives_the_results_of_the_whole(name):
    count = 0
    for program, floats, divided in programs_of(name):
        gradient = Gradient("main", floats)
        modules = [
            gradient(module)
            for module in (program.module, *(divided_module for divided_module, *_ in divided))
        ]
        executable = tvm.compile(_program.merge(modules), target="llvm")
        values = {argument.name: argument.value for argument in program.arguments}
        machine = relax.VirtualMachine(executable, tvm.cpu())
        loss, wanted = machine["main_1_adjoint"](*map(tvm.runtime.tensor, values.values()))
        is_double = {"float64"} == {str(value.dtype) for value in (loss, *wanted)}
        tolerance = 1e-9 if is_double else 1e-5
        for i, (_, shards, workers) in enumerate(divided, start=2):
            arguments = [list(part.values()) for part in shard_values(values, shards, workers)]
            with thread_workers() as start:
                results = start(workers).run(executable, f"main_{i}_adjoint", arguments)
            own = {key: shard for key, shard in shards.items() if key in floats}
            shares = [
                {key: grad.numpy() for key, grad in zip(floats, result[1], strict=True)}
                for result in results
            ]
            whole = join_values(shares, own)
            for result in results:
                np.testing.assert_allclose(
                    result[0].numpy(), loss.numpy(), tolerance, err_msg=str(shards)
                )
            for key, grad in zip(floats, wanted, strict=True):
                np.testing.assert_allclose(
                    whole[key],
                    grad.numpy(),
                    tolerance,
                    1e-3 * tolerance,
                    err_msg=f"{shards}: {key}",
                )
            count += 1
    assert count > 0
