"""The results of the checks of programs."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from .differential import Mismatch


@dataclass(frozen=True)
class Failure:
    """A fault that a program shows.

    Attributes
    ----------
    kind : str
        The fault, which does not change while the program shrinks.
    message : str
        The description of the fault.
    stage : str
        The stage: ``"differentiation"``, ``"compilation"``, ``"running"``, ``"value"`` or
        ``"pipeline"``.
    """

    kind: str
    message: str
    stage: str = "value"


@dataclass
class Outcome:
    """The result of the checks of one program.

    Attributes
    ----------
    failure : Failure or None
        The fault, if there is one.
    compared : set[str]
        The references of the comparison, such as ``"PyTorch"``, ``"differences"``, ``"pipeline"``
        or ``"NumPy"``.
    """

    failure: Failure | None = None
    compared: set[str] = field(default_factory=set)


def failure(stage: str, error: Exception) -> Failure:
    """Return the failure for an error at a stage of the checks."""
    if isinstance(error, Mismatch):
        return Failure(error.kind, error.message, stage)
    lines = [line for line in str(error).splitlines() if line.strip()] or ["(no message)"]
    # The same error may differ in numbers and addresses, and in its type where a pass has wrapped
    # it.
    tail = re.sub(r"0x[0-9a-f]+|\d+", "#", lines[-1])[-60:].strip()
    message = f"{stage}: {type(error).__name__}: " + "\n".join(lines[-6:])
    return Failure(f"error: {tail}", message, stage)
