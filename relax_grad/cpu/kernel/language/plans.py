"""Plans of kernels as text: a line for each decision."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from ...target import CPU


class Plan(ABC):
    """A plan of a kernel. ``str`` of a plan has a line for each decision."""

    @abstractmethod
    def lines(self) -> dict[str, str]:
        """Return the decisions and their values as text."""

    def __str__(self) -> str:
        return text_of(self.lines())


def text_of(lines: Mapping[str, str]) -> str:
    """Return decisions and their values as text, a line for each."""
    width = max(map(len, lines)) + 2
    return "\n".join(f"{name + ':':<{width}}{text}" for name, text in lines.items())


def extent_as_text(extent: object) -> str:
    """Return an extent as text, which may be an expression."""
    return str(extent) if isinstance(extent, int) else "symbolic"


def processor_as_text(cpu: CPU) -> str:
    """Return the processor of a plan as text."""
    tuning = cpu.tuning
    return f"{tuning.name}: {tuning.lanes} lanes, {tuning.registers} registers"


def ahead_as_text(steps: int) -> str:
    """Return the distance of a prefetch as text."""
    return f"{steps} steps ahead" if steps else "none"
