"""Samples of all operators, differentiated, through relax_grad's pipeline and through TVM's."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from programs import flat, to_numpy
from sweep import TARGET, share
from tvm import relax
from versions import WITHOUT

from relax_grad.cpu.schedule import _elements, _reduce, _stream
from relax_grad.cpu.target import host
from relax_grad.testing import _program
from relax_grad.testing._arguments import resolve
from relax_grad.testing.samples import sampled_operators, samples
from relax_grad.testing.samples._sample import cast

OPERATORS = [op for op in sampled_operators() if op not in WITHOUT]

#: The number of samples that are compiled together.
BATCH = 40

TOLERANCES = {"float16": 2e-2, "bfloat16": 5e-2, "float32": 2e-4, "float64": 1e-9}


def programs(dtype, keep=lambda op, i: True, *, symbolic=False, ops=OPERATORS):
    """Yield the differentiated samples of operators, with values for their parameters.

    With ``symbolic``, yield only samples that support symbolic axes, with these axes.
    """
    for op in ops:
        for i, sample in enumerate(samples(op)):
            if dtype not in ("float64", *sample.dtypes) or not keep(op, i):
                continue
            if sample.within.__name__ != "nullcontext":
                continue
            if symbolic and sample.symbolic is None:
                continue
            _, function = resolve(sample.function or sample.op)
            axes = sample.symbolic if symbolic else {}
            arguments = _program.make_arguments(cast(sample.inputs, dtype), None, axes)
            rng = np.random.default_rng(0)
            program = _program.first_order(function, arguments, sample.attrs, rng)
            floats = [argument.name for argument in program.arguments if argument.is_float]
            module = _program.differentiate(program, floats) if floats else program.module
            yield f"{op}-{i}", module, program.values(), bool(floats)


def run(modules, pipeline, target, values):
    """Compile modules together and run each."""
    module, target = _program.merge(modules), tvm.target.Target(target)
    machine = relax.VirtualMachine(tvm.compile(module, target, relax_pipeline=pipeline), tvm.cpu())
    for number, (arrays, is_adjoint) in enumerate(values, start=1):
        name = f"main_{number}_adjoint" if is_adjoint else f"main_{number}"
        yield flat(to_numpy(machine[name](*map(tvm.runtime.tensor, arrays))))


def check(cases, dtype, target=TARGET):
    """Compare the results of relax_grad's pipeline with those of TVM's."""
    names, modules, *values = zip(*cases, strict=True)
    values = list(zip(*values, strict=True))
    results = (run(modules, *how, values) for how in (("relax_grad", target), ("default", TARGET)))
    for name, ours, stock in zip(names, *results, strict=True):
        # A result in half precision, by an attribute out_dtype, is summed to the others.
        allowed = max(TOLERANCES.get(kind, 0) for kind in (dtype, *(str(b.dtype) for b in stock)))
        for a, b in zip(ours, stock, strict=True):
            tolerance = allowed * max(1.0, np.abs(b.astype("float64")).max(initial=0.0))
            np.testing.assert_allclose(
                a.astype("float64"), b.astype("float64"), 0, tolerance, err_msg=f"{name} {dtype}"
            )


def in_batches(cases):
    cases = list(cases)
    return [cases[i : i + BATCH] for i in range(0, len(cases), BATCH)]


@pytest.mark.slow
def test_samples_of_all_operators():
    for batch in in_batches(programs("float32", ops=share(OPERATORS))):
        check(batch, "float32", host())


@pytest.fixture
def large(monkeypatch):
    """Apply the optimizations for large tensors to small ones too."""
    monkeypatch.setattr(_elements, "SMALL", 2)
    monkeypatch.setattr(_reduce, "_PIECE", 2)
    monkeypatch.setattr(_elements, "LINE", 4)
    monkeypatch.setattr(_stream, "LARGE", 2)


@pytest.mark.slow
@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_samples_as_if_they_were_large(dtype):
    """All samples in float32, and the first of each operator in the other dtypes."""
    chosen = programs(dtype, lambda op, i: i == 0 or dtype == "float32", ops=share(OPERATORS))
    for batch in in_batches(chosen):
        check(batch, dtype)


@pytest.mark.slow
@pytest.mark.usefixtures("large")
def test_symbolic_samples_as_if_they_were_large():
    for batch in in_batches(programs("float32", symbolic=True, ops=share(OPERATORS))):
        check(batch, "float32")


@pytest.mark.usefixtures("large")
def test_first_samples_as_if_they_were_large():
    check(list(programs("float32", lambda op, i: i == 0))[::6], "float32")
