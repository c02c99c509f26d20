"""Gradients of random programs of tensor functions, compared with central differences by NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace

import numpy as np
import tvm

import relax_grad
from relax_grad.errors import GradientError
from relax_grad.testing.fuzz.tir import checks
from relax_grad.testing.fuzz.tir import language as ir
from relax_grad.testing.fuzz.tir.build import build
from relax_grad.testing.fuzz.tir.expressions import is_float
from relax_grad.testing.fuzz.tir.interpret import InvalidError, inputs_of, interpret

#: The step of differences, and the largest accepted relative error.
_STEP, _TOLERANCE = 1e-6, 1e-5

#: The relative difference of the two one-sided differences from which a point counts as a kink.
_KINK = 1e-4


@dataclass
class Result:
    """The result of the check of one program.

    Attributes
    ----------
    compared, skipped : int
        The directions that were compared, and those that cross a kink.
    miscompiled : bool
        Whether TVM cannot compile the program itself, or compiles it wrongly, as some indices with
        divisions.
    refusal : str
        The error message, if the program has no gradient.
    """

    compared: int = 0
    skipped: int = 0
    miscompiled: bool = False
    refusal: str = ""


class WrongGradientError(AssertionError):
    """A gradient differs from the central differences."""


def in_float64(tree):
    """Return a description with float64 in the place of all floating-point types."""
    if isinstance(tree, tuple):
        return tuple(map(in_float64, tree))
    if not is_dataclass(tree):
        return tree
    values = {field.name: in_float64(getattr(tree, field.name)) for field in fields(tree)}
    if "dtype" in values and is_float(values["dtype"]) and not isinstance(tree, ir.Let):
        values["dtype"] = "float64"
    return replace(tree, **values)


def check(programs: Sequence[ir.Program], pipeline: str = "relax_grad") -> list[Result]:
    """Compile the gradients of programs together, and check each.

    Raises
    ------
    WrongGradientError
        If a gradient is wrong.
    """
    results, modules, names = [Result() for _ in programs], [], {}
    for i, program in enumerate(programs):
        if not _has_gradient(program):
            continue
        module = build(program, f"p{i}")
        try:
            modules.append(relax_grad.vjp(module, f"p{i}"))
        except GradientError as error:
            results[i].refusal = str(error)
            continue
        tvm.relax.analysis.well_formed(modules[-1])
        names[i] = f"p{i}_vjp"
    if modules:
        try:
            machine = checks.compiled(checks.merged(modules), pipeline)
        except Exception:
            if len(programs) > 1:
                return [result for program in programs for result in check([program], pipeline)]
            if _compiles(programs[0], pipeline):
                raise
            return [Result(miscompiled=True)]
        for i, name in names.items():
            for n in programs[i].batches:
                _compare(programs[i], n, machine[name], results[i])
    return results


def _compiles(program: ir.Program, pipeline: str) -> bool:
    try:
        checks.compiled(build(program), pipeline)
    except Exception:  # a limit of TVM
        return False
    return True


def _has_gradient(program: ir.Program) -> bool:
    tensors = program.tensors()
    return any(is_float(param.dtype) for param in program.params) and any(
        is_float(tensors[name].dtype) for name in program.results
    )


def _compare(program: ir.Program, n: int, function, result: Result) -> None:
    rng = np.random.default_rng(program.seed)
    inputs = [
        np.asarray(rng.uniform(-2, 2, value.shape)) if is_float(str(value.dtype)) else value
        for value in inputs_of(program, n)
    ]
    try:
        values = interpret(program, n, inputs)
    except InvalidError:
        return
    tensors = program.tensors()
    kept = [name for name in program.results if is_float(tensors[name].dtype)]
    weights = {
        name: np.where(values[name].written, rng.uniform(-1, 1, values[name].values.shape), 0.0)
        for name in kept
    }
    arguments = [*inputs, *(weights[name] for name in kept)]
    results, gradients = function(*(tvm.runtime.tensor(np.array(a)) for a in arguments))
    results = results if len(program.results) > 1 else [results]
    for name, value in zip(program.results, results, strict=True):
        right = ~values[name].written | np.isclose(value.numpy(), values[name].values, 1e-9, 1e-9)
        if not right.all():
            result.miscompiled = True
            return
    places = [i for i, param in enumerate(program.params) if is_float(param.dtype)]
    gradients = [grad.numpy() for grad in gradients]

    def loss(step: float, direction) -> float:
        moved = list(inputs)
        for i, offset in zip(places, direction, strict=True):
            moved[i] = np.asarray(inputs[i] + step * offset)
        moved_tensors = interpret(program, n, moved)
        # Unwritten elements have the weight 0.
        return sum(float(np.sum(weights[name] * moved_tensors[name].values)) for name in kept)

    here = loss(0.0, [0.0] * len(places))
    for _ in range(2):
        direction = [rng.uniform(-1, 1, inputs[i].shape) for i in places]
        try:
            ahead, behind = loss(_STEP, direction), loss(-_STEP, direction)
        except InvalidError:
            result.skipped += 1
            continue
        slopes = (ahead - here) / _STEP, (here - behind) / _STEP
        scale = 1.0 + max(map(abs, slopes)) + 1e-4 * abs(here)
        if not abs(slopes[0] - slopes[1]) <= _KINK * scale:
            result.skipped += 1
            continue
        slope = sum(float(np.sum(g * d)) for g, d in zip(gradients, direction, strict=True))
        wanted = (ahead - behind) / (2 * _STEP)
        if not abs(slope - wanted) <= _TOLERANCE * scale:
            raise WrongGradientError(
                f"n = {n}: the gradient along a direction is {slope:.9g}, but {wanted:.9g} by "
                "differences"
            )
        result.compared += 1
