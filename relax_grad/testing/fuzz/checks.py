"""The checks of programs: differentiation, compilation of several together, and comparison.

The adjoint functions are compared with PyTorch's automatic differentiation of the same programs, if
PyTorch has all their operators, and with central differences of the compiled programs themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tvm
from tvm import relax

from ..._packages import is_usable
from ...transform import LiftBranches
from .. import _program
from .differential import (
    Mismatch,
    Reference,
    call,
    compare,
    compile_all,
    float_leaves,
    parse,
    variables,
)
from .outcomes import Outcome, failure
from .pipelines import check_pipelines
from .script import BATCH, Program, project

#: The largest accepted error relative to the largest number, by the narrowest dtype.
TOLERANCES = {"float64": 1e-7, "float32": 2e-3, "float16": 5e-2, "bfloat16": 0.2}

#: The largest accepted error of central differences, and the larger of their two steps, which is
#: twice the other one. In half precision, the results are steps.
_DIFFERENCES = {"float64": (2e-5, 2e-4), "float32": (3e-2, 5e-2)}

_DIRECTIONS = 3


@dataclass(frozen=True)
class Settings:
    """The settings of the checks.

    Attributes
    ----------
    through : str
        The differentiation pass, by its name in ``check_gradients``.
    pipeline : bool
        Whether to also compile with ``relax_grad.pipeline``, in float32, and compare.
    torch : bool
        Whether to compare with PyTorch.
    """

    through: str = "relax_grad"
    pipeline: bool = False
    torch: bool = field(default_factory=functools.partial(is_usable, "torch"))


def check(programs: Sequence[Program], settings: Settings) -> list[Outcome]:
    """Differentiate programs, compile them together, and compare each.

    Raises
    ------
    Exception
        If they do not compile together.
    """
    outcomes = [Outcome() for _ in programs]
    checks = [_Check(f"p{i}", program, settings) for i, program in enumerate(programs)]
    for prepared, outcome in zip(checks, outcomes, strict=True):
        _record(outcome, "differentiation", prepared.differentiate)
    ready = [
        pair
        for pair in zip(checks, outcomes, strict=True)
        if pair[1].failure is None and pair[0].module is not None
    ]
    if not ready:
        return outcomes
    with _program.without_assertions():
        # TVM plans the memory of a function as if all its branches were taken.
        lift = LiftBranches()
        lifted = [
            lift(check.module)  # type: ignore[operator]  # TVM's decorator makes a pass of the class
            for check, _ in ready
        ]
        machine = compile_all(lifted)
    for prepared, outcome in ready:
        if _record(outcome, "running", lambda prepared=prepared: prepared.run(machine)):
            _record(outcome, "value", lambda e=prepared, o=outcome: e.compare(o))
    if settings.pipeline:
        _compare_pipelines(ready)
    return outcomes


def check_one(program: Program, settings: Settings) -> Outcome:
    """Check a program; a compilation error is a separate kind of failure."""
    try:
        return check([program], settings)[0]
    except Exception as error:  # any is a finding
        return Outcome(failure("compilation", error))


def _record(outcome: Outcome, stage: str, function: Callable) -> bool:
    try:
        function()
    except Exception as error:  # any is a finding
        outcome.failure = failure(stage, error)
        return False
    return True


def _compare_pipelines(ready: Any) -> None:
    from ...cpu.target import host

    targets = {"this machine": host()}
    for case, outcome in ready:
        if outcome.failure is None:
            check = functools.partial(check_pipelines, [case.program], (BATCH, 3), targets)
            if _record(outcome, "pipeline", check):
                outcome.compared.add("pipeline")


class _Check:
    """The checks of one program."""

    def __init__(self, name: str, program: Program, settings: Settings):
        self.name, self.program, self.settings = name, program, settings
        self.module: tvm.IRModule | None = None
        self.results: Any = None  # nested tuples of tensors

    def differentiate(self) -> None:
        module = parse(self.program, self.name)
        wrt = variables(module, self.name, self.program)
        target = self.program.target or 0
        if self.settings.through == "relax_grad":
            module = _program.PASSES["relax_grad"](self.name, wrt, target)(module)
        else:
            module = _program.PASSES["tvm"](self.name, wrt)(module)
        if not relax.analysis.check_well_formed(module):
            raise ValueError("the differentiated module is not well-formed")
        # TVM does not compile the local functions that remain.
        if not self.program.has_local_functions:
            self.module = module

    def run(self, machine: Any) -> None:
        self.machine = machine
        self.values = self.program.values()
        self.results = call(machine, f"{self.name}_adjoint", self.values)

    @functools.cached_property
    def gradients(self) -> list[np.ndarray]:
        return float_leaves(self.results[1])

    def compare(self, outcome: Outcome) -> None:
        result = call(self.machine, self.name, self.values)
        tolerance = TOLERANCES[self.program.narrowest]
        compare(
            "result", float_leaves(self.results[0]), float_leaves(result), tolerance, "the program"
        )
        if self.settings.torch and self.program.has_torch:
            outcome.compared.add("PyTorch")
            self.compare_torch(float_leaves(result), tolerance)
        names = {param.name for param in self.program.main.params}
        is_fit = self.program.is_smooth and all(v.name in names for v in self.program.wrt)
        is_fit &= self.program.narrowest in _DIFFERENCES
        # In float32 the steps are wide, and differences cannot tell a jump within them from a
        # derivative.
        is_fit &= not (self.program.narrowest == "float32" and self.program.has_jumps)
        if is_fit and self.compare_differences():
            outcome.compared.add("differences")

    def compare_torch(self, result: Any, tolerance: float) -> None:
        import torch

        torch.set_num_threads(1)
        reference = Reference(torch, self.program)
        wanted = [leaf.detach().numpy() for leaf in float_leaves(reference.result)]
        compare("forward", result, wanted, tolerance, "PyTorch")
        wanted = [gradient.numpy() for gradient in reference.gradients()]
        compare("gradient", self.gradients, wanted, tolerance, "PyTorch")

    def compare_differences(self) -> bool:
        """Compare with central differences where two steps agree; tell whether any direction was
        compared."""
        tolerance, step = _DIFFERENCES[self.program.narrowest]
        rng = np.random.default_rng(self.program.seed)
        trusted = 0
        for _ in range(_DIRECTIONS):
            directions = [rng.uniform(-1, 1, gradient.shape) for gradient in self.gradients]
            products = [
                float(np.sum(g * d)) for g, d in zip(self.gradients, directions, strict=True)
            ]
            slope, scale = sum(products), max(1.0, *map(abs, products))
            full, other = (self.difference(directions, h) for h in (step, step / 2))
            scale = max(scale, abs(other))
            if not abs(full - other) <= tolerance / 2 * scale:
                continue
            trusted += 1
            if not abs(slope - other) <= tolerance * scale:
                raise Mismatch(
                    "gradient",
                    f"along a random direction the derivative is {slope:.9g}, but central "
                    f"differences give {other:.9g}",
                )
        return trusted > 0

    def difference(self, directions: Any, step: float) -> float:
        """Return the fourth-order central difference along directions."""

        def at(offset: float) -> float:
            moved = dict(zip(self.wrt_paths, directions, strict=True))
            values = [
                _moved(value, (param.name,), moved, offset * step)
                for value, param in zip(self.values, self.program.main.params, strict=True)
            ]
            return float(project(call(self.machine, self.name, values), self.program.target))

        return (8 * (at(1) - at(-1)) - (at(2) - at(-2))) / (12 * step)

    @functools.cached_property
    def wrt_paths(self) -> list[tuple]:
        return [
            (value.name, *leaf.path)
            for value in self.program.wrt
            for leaf in value.leaves()
            if leaf.tensor.is_float
        ]


def _moved(value: Any, path: tuple, moved: dict, factor: float) -> Any:
    if isinstance(value, list):
        return [_moved(item, (*path, i), moved, factor) for i, item in enumerate(value)]
    return value + factor * moved[path] if path in moved else value
