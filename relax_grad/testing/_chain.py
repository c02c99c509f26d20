"""Programs that are differentiated repeatedly, and their gradients of all orders."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import tvm
from tvm_ffi import structural_equal

from ..errors import GradientCheckError
from . import _program
from ._program import Argument, Program


@dataclass(frozen=True)
class Level:
    """A program of one order, the differentiated parameters, and the differentiated module."""

    program: Program
    wrt: Sequence[str]
    module: tvm.IRModule


def levels(
    program: Program, wrt: Sequence[str], order: int, seed: int, through: str = "relax_grad"
) -> Iterator[Level]:
    """Differentiate a program of order 1 repeatedly, with the pass that ``through`` names.

    From order 2 on, gradients with respect to the cotangents are taken too.
    """
    for number in range(1, order + 1):
        module = _program.differentiate(program, wrt, through)
        yield Level(program, wrt, module)
        if number < order:
            rng = np.random.default_rng(seed + number)
            program = _program.next_order(program, module, wrt, rng)
            if number == 1:
                wrt = [*wrt, *(a.name for a in program.arguments if _is_cotangent(a))]


class Chain:
    """A program that is differentiated repeatedly."""

    def __init__(
        self, name: str, program: Program, wrt: list[str], order: int, through: str, seed: int
    ) -> None:
        self.name = name
        self.levels: list[Level] = []
        self.failure: Exception | None = None
        try:
            chain = levels(program, wrt, order, seed, through)
            for number, level in enumerate(chain, start=1):
                self._check_types(number, level.program, level.wrt, level.module)
                self.levels.append(level)
        except Exception as error:
            if not self.levels:
                raise
            self.failure = error  # raised once the orders below it are checked

    def bind(self, run: Callable, first: int) -> None:
        """Take the callable that runs the compiled levels, and the number of the first level."""
        self._run = lambda order, suffix, values: run(f"main_{first + order - 1}{suffix}", values)

    def level(self, order: int) -> Level:
        if order > len(self.levels):
            raise cast(Exception, self.failure)
        return self.levels[order - 1]

    def loss(self, order: int, values: Sequence[np.ndarray]) -> float:
        return float(self._run(order, "", values))

    def gradients(self, order: int, values: Sequence[np.ndarray] | None = None) -> list[np.ndarray]:
        """Return the gradients at the values of the parameters, by default the
        program's values."""
        level = self.level(order)
        arguments = by_name(level.program)
        own = level.program.values()
        if values is not None:
            own = [value.astype(like.dtype) for value, like in zip(values, own, strict=True)]
        gradients = self._run(order, "_adjoint", own)[1]
        for name, gradient in zip(level.wrt, gradients, strict=True):
            if gradient.shape != arguments[name].value.shape:
                raise GradientCheckError(
                    f"{self.name}, order {order}: the gradient of {name} has the shape "
                    f"{gradient.shape}, but {name} has the shape {arguments[name].value.shape}"
                )
        return [gradient.astype("float64") for gradient in gradients]

    def _check_types(
        self, order: int, program: Program, wrt: Sequence[str], module: tvm.IRModule
    ) -> None:
        types = module["main_adjoint"].ret_ty.fields[1].fields
        arguments = by_name(program)
        for name, gradient_type in zip(wrt, types, strict=True):
            if not structural_equal(gradient_type, arguments[name].type, map_free_vars=True):
                raise GradientCheckError(
                    f"{self.name}, order {order}: the gradient of {name} has the type "
                    f"{gradient_type}, but {name} has the type {arguments[name].type}"
                )


def by_name(program: Program) -> dict[str, Argument]:
    """Return the arguments of a program by their names."""
    return {argument.name: argument for argument in program.arguments}


def _is_cotangent(argument: Argument) -> bool:
    return argument.is_float and argument.name.startswith("cotangent")
