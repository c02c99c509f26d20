"""Error of every gradient in every dtype, against float64, for docs/accuracy.md."""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import _figures
import numpy as np
from _benchmark import Benchmark, facts, named

from relax_grad.testing import _program
from relax_grad.testing.check import resolve, select_wrt
from relax_grad.testing.parity import PreparedParity, TorchCase
from relax_grad.testing.samples import Sample, sampled_operators, samples
from relax_grad.testing.samples._sample import cast

DTYPES = ("float64", "float32", "float16", "bfloat16")

#: The distance from 1 to the next number.
EPSILON = {dtype: epsilon for dtype, (epsilon, _) in _figures.DTYPES.items()}

#: The number of samples of an operator that are measured in each dtype.
_SAMPLES = 4


@dataclass(frozen=True)
class Error:
    """The largest error of an operator's gradients in a dtype.

    Attributes
    ----------
    relative : float
        The largest difference of an element, relative to the largest element of the same gradient.
    sample : str
        The note of the sample with this error, and the argument.
    count : int
        The number of measured samples.
    """

    relative: float
    sample: str
    count: int


def measure(operator: str) -> dict[str, Error]:
    """Return the largest error of an operator's samples, by dtype.

    Inputs and cotangents are rounded to the dtype first, and the gradient of the same numbers is
    computed in float64: the error is that of the computation. Float64 itself is compared with
    PyTorch's float64, for the samples with a function in PyTorch.
    """
    measured: dict[str, list[tuple[float, str]]] = {}
    for sample, dtypes in _chosen(operator):
        with sample.within():
            for dtype, error, argument in _errors(sample, dtypes):
                note = f"{sample.note}, {argument}"
                measured.setdefault(dtype, []).append((error, note))
    return {
        dtype: Error(*max(measured[dtype]), len(measured[dtype]))
        for dtype in DTYPES
        if dtype in measured
    }


def _chosen(operator: str) -> Iterator[tuple[Sample, list[str]]]:
    """Yield samples with the dtypes to measure them in: for each dtype, the first samples that
    support it."""
    left = dict.fromkeys(DTYPES, _SAMPLES)
    for sample in samples(operator):
        can = [*(["float64"] if sample.torch else []), *sample.dtypes] if sample.smooth else []
        chosen = [dtype for dtype in can if left[dtype]]
        left.update({dtype: left[dtype] - 1 for dtype in chosen})
        if chosen:
            yield sample, chosen


def _errors(sample: Sample, dtypes: Sequence[str]) -> Iterator[tuple[str, float, str]]:
    """Yield dtype, error and argument of the worst gradient of a sample in each of some dtypes."""
    narrow = [dtype for dtype in dtypes if dtype != "float64"]
    programs = {dtype: _first_order(sample, dtype) for dtype in ("float64", *narrow)}
    exact = programs["float64"]
    wrt = select_wrt(exact.arguments, sample.wrt)
    modules = [_program.differentiate(program, wrt) for program in programs.values()]
    together = _program.merge(modules)
    for number in range(1, len(modules) + 1):
        del together[f"main_{number}"]
    run = _program.compile_module(together, "llvm")
    for number, (dtype, program) in enumerate(programs.items(), start=1):
        grads = run(f"main_{number}_adjoint", program.values())[1]
        if dtype not in dtypes:
            continue
        if dtype == "float64":
            wanted = _of_torch(sample)
        else:
            wanted = run("main_1_adjoint", _same_values(program, exact))[1]
        if wanted is not None:
            yield dtype, *max(map(_relative, grads, wanted, wrt), default=(0.0, ""))


def _first_order(sample: Sample, dtype: str) -> _program.Program:
    _, function = resolve(sample.function or sample.op)
    arguments = _program.make_arguments(cast(sample.inputs, dtype), None, {})
    return _program.first_order(function, arguments, sample.attrs, np.random.default_rng(0))


def _same_values(narrow: _program.Program, exact: _program.Program) -> list[np.ndarray]:
    """Return the values of a program in the dtypes of another."""
    pairs = zip(narrow.arguments, exact.arguments, strict=True)
    return [a.value.astype(_program.numpy_dtype(b.dtype)) for a, b in pairs]


def _of_torch(sample: Sample) -> list[np.ndarray] | None:
    """Return PyTorch's gradients in float64, or None if PyTorch or the function in it is
    missing."""
    if sample.torch is None or not importlib.util.find_spec("torch"):
        return None
    function = sample.function or sample.op
    case = TorchCase(function, sample.inputs, sample.torch, sample.attrs, sample.wrt)
    return PreparedParity(case, "relax_grad", 0.0, 0).run_torch()[1]


def _relative(result: np.ndarray, wanted: np.ndarray, argument: str) -> tuple[float, str]:
    if not wanted.size:
        return 0.0, argument
    result, wanted = result.astype("float64"), wanted.astype("float64")
    error = np.where(result == wanted, 0.0, np.abs(result - wanted)).max()
    scale = np.abs(wanted).max()
    return float(error / scale if scale else error), argument


def measured(operator: str, args: Namespace) -> dict:
    """Return the errors as written to the file: with three digits, more than are reproducible."""
    return {
        dtype: asdict(replace(error, relative=float(f"{error.relative:.2e}")))
        for dtype, error in measure(operator).items()
    }


BENCHMARK = Benchmark(
    rows=lambda args: {name: name for name in sorted(sampled_operators())},
    measure=measured,
    json="accuracy.json",
    head=lambda args: {"about": facts("processor", "python", "tvm", "numpy", "torch")},
    layout=named("errors"),
    draw=_figures.draw_accuracy,
    jobs=2,
)
