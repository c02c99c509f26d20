"""The subject of a session that compiles programs of TIR."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from ..outcomes import Failure, Outcome
from ..session import Finding
from . import checks, report, shrink
from . import language as ir
from .build import source
from .programs import draw


class Tir:
    """Programs of TIR functions; see :class:`..session.Subject`."""

    #: Joint compilation takes a fraction of the time.
    batch = 25
    part = ("of", "kind")
    title = "TIR functions compiled by relax_grad.pipeline"
    against = "NumPy, and so is TVM's pipeline"
    references: ClassVar = {
        "NumPy": "NumPy",
        "not TVM": "NumPy, where TVM's pipeline fails or is wrong",
        "TVM": "no reference: both pipelines fail, or are wrong",
    }

    def draw(self, seed: int, number: int) -> ir.Program:
        return draw(seed, number)

    def check(self, programs: Sequence[ir.Program]) -> list[Outcome]:
        return checks.check(programs)

    def check_one(self, program: ir.Program) -> Outcome:
        return checks.check_one(program)

    def check_stock(self, program: ir.Program) -> None:
        checks.attempt(program, "default")

    def failure_of(self, program: ir.Program) -> Failure | None:
        return checks.failure_of(program)

    def shrink(self, program: ir.Program, fails: Callable[[ir.Program], bool]) -> ir.Program:
        return shrink.shrink(program, fails)

    def size(self, program: ir.Program) -> int:
        """Return the number of blocks and of operators."""
        blocks = [node for node in ir.nodes(program.functions) if isinstance(node, ir.Block)]
        return len(blocks) + sum(isinstance(step, ir.Operator) for step in program.steps)

    def parts(self, program: ir.Program) -> set[str]:
        return set(program.kinds)

    def source(self, finding: Finding[ir.Program]) -> str:
        return source(finding.program).rstrip()

    def script(self, finding: Finding[ir.Program], seed: int) -> str:
        return report.script(finding, seed)
