"""The checks of programs: compiled by the pipeline and by TVM's, run, and compared with NumPy."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.ir import GlobalVar

from ....cpu.target import host
from ....errors import ScheduleWarning
from ... import _program
from ..._compare import difference
from ..differential import TARGET, Mismatch
from ..outcomes import Failure, Outcome, failure
from ..session import can_fork
from .build import build
from .interpret import Run, expected
from .language import Program
from .memory import guarded

#: The largest accepted error of values that depend on rounding, relative to the largest number.
#: Others must be equal.
_TOLERANCES = {"float16": 2e-2, "bfloat16": 0.15, "float32": 2e-5, "float64": 2e-5}

#: The pipelines, by TVM's names. The first is the pipeline under test.
PIPELINES = ("relax_grad", "default")


def check(programs: Sequence[Program]) -> list[Outcome]:
    """Compile programs together, run each and compare.

    Raises
    ------
    Exception
        If they do not compile together.
    """
    together = merged([build(program, f"p{i}") for i, program in enumerate(programs)])
    machines = {name: compiled(together, name) for name in PIPELINES}
    outcomes = []
    for i, program in enumerate(programs):
        runs = expected(program)
        failures = {
            name: run(program, machines[name], f"p{i}", runs, is_guarded=_is_guarded(name))
            for name in PIPELINES
        }
        outcomes.append(judge(failures))
    return outcomes


def check_one(program: Program) -> Outcome:
    """Check a program; a compilation error is a failure if TVM's pipeline compiles the program."""
    return judge({name: attempt(program, name) for name in PIPELINES})


def failure_of(program: Program) -> Failure | None:
    """Return the failure of a program; TVM's pipeline runs only if the pipeline under test
    fails."""
    ours = attempt(program, "relax_grad")
    if ours is None:
        return None
    return judge(dict(zip(PIPELINES, (ours, attempt(program, "default")), strict=True))).failure


def judge(failures: dict[str, Failure | None]) -> Outcome:
    """Return the outcome for the failures of the two pipelines."""
    ours, stock = (failures[name] for name in PIPELINES)
    if ours is None:
        return Outcome(None, {"NumPy"} if stock is None else {"NumPy", "not TVM"})
    if stock is not None and (stock.stage != "compilation" or ours.stage == "compilation"):
        return Outcome(None, {"TVM"})
    # If TVM's pipeline merely fails to compile, the pipeline under test must still be right.
    return Outcome(ours, {"NumPy"})


def attempt(program: Program, pipeline: str) -> Failure | None:
    """Compile and run a program by one pipeline; return the failure, if any."""
    module = build(program)
    try:
        machine = compiled(module, pipeline)
    except Exception as error:  # any is a finding
        return failure("compilation", error)
    return run(program, machine, "main", expected(program), is_guarded=_is_guarded(pipeline))


def _is_guarded(pipeline: str) -> bool:
    return pipeline == "relax_grad" and can_fork()


def compiled(module: tvm.IRModule, pipeline: str) -> relax.VirtualMachine:
    """Compile a module; TVM's pipeline compiles without optimizations to save time."""
    target = host() if pipeline == "relax_grad" else tvm.target.Target(TARGET)
    with _program.without_assertions(), warnings.catch_warnings():
        warnings.simplefilter("error", ScheduleWarning)
        return relax.VirtualMachine(tvm.compile(module, target, relax_pipeline=pipeline), tvm.cpu())


def run(
    program: Program,
    machine: relax.VirtualMachine,
    name: str,
    runs: Sequence[Run],
    *,
    is_guarded: bool,
) -> Failure | None:
    """Run a program and compare its results and parameters with NumPy's; return the failure, if
    any.

    Parameters
    ----------
    program : Program
        The program.
    machine : relax.VirtualMachine
        The compiled program.
    name : str
        The Relax function.
    runs : Sequence[Run]
        The parameters, and NumPy's tensors.
    is_guarded : bool
        Whether the parameters end, and in a second run begin, at an unreadable page. Functions may
        then rely only on the alignment of the elements. The functions of TVM's pipeline rely on
        more.
    """
    places = [functools.partial(guarded, at_end=at_end) for at_end in (True, False)]
    try:
        for run, place in itertools.product(runs, places if is_guarded else [tvm.runtime.tensor]):
            params = [place(value) for value in run.inputs]
            leaves = _leaves(machine[name](*params))
            for tensor, param in zip(program.params, params, strict=True):
                _compare(program, tensor.name, param.numpy(), run)
            for result, value in zip(program.results, leaves, strict=True):
                _compare(program, result, value.numpy(), run)
    except Exception as error:  # any is a finding
        return failure("running", error)
    return None


def merged(modules: Sequence[tvm.IRModule]) -> tvm.IRModule:
    """Merge modules with distinct function names into one."""
    functions: dict[GlobalVar, object] = {}
    for module in modules:
        functions.update(module.functions_items())
    return tvm.IRModule(functions)


def _leaves(value: Any) -> list:
    return list(value) if hasattr(value, "__len__") and not hasattr(value, "numpy") else [value]


def _compare(program: Program, name: str, actual: np.ndarray, run: Run) -> None:
    """Compare the written elements of a tensor with NumPy's values.

    Raises
    ------
    Mismatch
        If it differs.
    """
    where = f"{name} (n = {run.n})" if program.is_symbolic else name
    wanted = run.wanted[name]
    values = wanted.values
    if actual.shape != values.shape or actual.dtype != values.dtype:
        raise Mismatch(
            "value", f"{where} is {actual.dtype}{actual.shape}, not {values.dtype}{values.shape}"
        )
    is_exact = name not in program.inexact or str(values.dtype) not in _TOLERANCES
    tolerance = 0.0 if is_exact else _TOLERANCES[str(values.dtype)]
    worst = difference(np.where(wanted.written, actual, values), values)
    if not worst.error <= tolerance:
        raise Mismatch(
            "value", f"{where}[{worst.at}] is {worst.actual:.9g}, but {worst.wanted:.9g} by NumPy"
        )
