"""The subject of a session that differentiates programs."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from . import checks, report, shrink
from .outcomes import Failure, Outcome
from .programs import FEATURES, random_program
from .script import Program, flat
from .session import Finding

#: The features that TVM's pass supports.
OF_STOCK = ("checkpoints", "intermediates", "stop_gradient", "tuple_parameters")

#: The share of programs with a feature; a quarter for the other features. Central differences
#: cannot check the first two, and TVM does not compile local functions.
_SHARES = {"stop_gradient": 0.1, "intermediates": 0.1, "locals": 0.1}

#: The most statements of a program with half precision, whose rounding errors grow with each.
_MOST_IN_HALVES = 12


def draw(seed: int, number: int, through: str = "relax_grad") -> Program:
    """Return a program of a session.

    Parameters
    ----------
    seed : int
        The seed of the session.
    number : int
        The number of the program, from 0.
    through : str
        The differentiation pass; TVM's pass does not support every feature.
    """
    rng = random.Random(f"{seed}/{number}")
    length = rng.randint(5, 15) if rng.random() < 0.6 else rng.randint(5, 50)
    known = OF_STOCK if through == "tvm" else FEATURES
    features = {name for name in known if rng.random() < _SHARES.get(name, 0.25)}
    features |= {"float32"} if rng.random() < 0.3 else set()
    features |= {rng.choice(["samples", "samples_of_torch"])} if rng.random() < 0.85 else set()
    own_seed = rng.randrange(2**32)
    features |= {"halves"} if length <= _MOST_IN_HALVES and rng.random() < 0.3 else set()
    program = random_program(own_seed, length, features)
    return for_stock(program) if through == "tvm" else program


def for_stock(program: Program) -> Program:
    """Return a program with the variables that TVM's pass takes: those that hold no other than
    floating-point tensors."""
    wrt = [value for value in program.wrt if all(tensor.is_float for tensor in flat(value.kind))]
    return replace(program, wrt=tuple(wrt or program.main.params[:1]))


@dataclass(frozen=True)
class Gradients:
    """Programs that are differentiated; see :class:`.session.Subject`."""

    settings: checks.Settings

    #: Joint compilation takes a fraction of the time.
    batch = 20
    part = ("with samples of", "operator")

    @property
    def title(self) -> str:
        return f"through {self.settings.through}"

    @property
    def against(self) -> str:
        return f"{'PyTorch and ' if self.settings.torch else ''}central differences"

    @property
    def references(self) -> dict[str, str]:
        return {
            "PyTorch": "PyTorch" if self.settings.torch else "PyTorch, which is not installed",
            "differences": "central differences",
            **({"pipeline": "relax_grad.pipeline"} if self.settings.pipeline else {}),
            "nothing": "no reference: differentiated only, or at a discontinuity",
        }

    def draw(self, seed: int, number: int) -> Program:
        return draw(seed, number, self.settings.through)

    def check(self, programs: Sequence[Program]) -> list[Outcome]:
        return checks.check(programs, self.settings)

    def check_one(self, program: Program) -> Outcome:
        return checks.check_one(program, self.settings)

    def check_stock(self, program: Program) -> None:
        """Do nothing: TVM does not differentiate every program, so no crash is attributed to it."""

    def failure_of(self, program: Program) -> Failure | None:
        return checks.check_one(program, self.settings).failure

    def shrink(self, program: Program, fails: Callable[[Program], bool]) -> Program:
        return shrink.shrink(program, fails)

    def size(self, program: Program) -> int:
        return sum(1 for _ in program.lets())

    def parts(self, program: Program) -> set[str]:
        return {operator for let in program.lets() for operator in let.operators}

    def source(self, finding: Finding[Program]) -> str:
        return report.source(finding)

    def script(self, finding: Finding[Program], seed: int) -> str:
        return report.script(finding, seed, self.settings)
