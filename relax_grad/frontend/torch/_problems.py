"""Operations that cannot be imported, and the lines of the user's code that made them."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import fx

from ...errors import UnsupportedOperatorError

_OWN = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep)


_LIBRARY = os.path.dirname(os.__file__) + os.sep


_FRAME = re.compile(
    r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)(\n\s+(?P<code>.*))?'
)


class Problem(NamedTuple):
    """An operation that cannot be imported.

    Attributes
    ----------
    operator : str
        The name of its operator.
    reason : str
        The reason, and a way to go on.
    line : str
        The line of the user's code that made it.
    """

    operator: str
    reason: str
    line: str


def problem(node: fx.Node, reason: str) -> Problem:
    """Return the problem of a node."""
    return Problem(operator_of(node), reason, line_of(node))


def operator_of(node: fx.Node) -> str:
    """Return the name of the operator of a node for a message."""
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target)
    return getattr(node.target, "__name__", str(node.target))


def is_user_file(name: str) -> bool:
    """Tell whether a file is outside PyTorch, this package, and Python's standard library."""
    is_standard = name.startswith(_LIBRARY) and "-packages" not in name
    return not (name.startswith(_OWN) or is_standard or name.startswith("<"))


def user_line(frames: Iterable[traceback.FrameSummary]) -> str | None:
    """Return the innermost line of code outside PyTorch among the frames of a stack."""
    users = [frame for frame in frames if is_user_file(frame.filename)]
    if not users:
        return None
    return f"{users[-1].filename}:{users[-1].lineno}, in {users[-1].name}: {users[-1].line}"


def line_of(node: fx.Node) -> str:
    """Return the innermost line of code outside PyTorch that made a node, and its submodule."""
    frames = list(_FRAME.finditer(node.meta.get("stack_trace") or ""))
    frames = [match for match in frames if is_user_file(match["file"])]
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = ".".join(str(stack[-1][0]).split(".")[1:]).removeprefix("module") if stack else ""
    where = f"the submodule {path.removeprefix('.')}" if path.removeprefix(".") else ""
    if frames:
        frame = frames[-1]
        code = (frame["code"] or "").strip().removeprefix("code: ")
        line = (
            f"{frame['file']}:{frame['line']}, in {frame['function']}{f': {code}' if code else ''}"
        )
        return f"{line} ({where})" if where else line
    return where or "an unknown line"


def raise_problems(problems: Iterable[Problem]) -> None:
    """Raise one error that lists problems, if there are any; problems of one operator in one line
    are listed once."""
    text = text_of(problems)
    if text:
        raise UnsupportedOperatorError(
            (
                "these operations of the model cannot be imported with the meaning that they have "
                "in PyTorch:\n"
            )
            + text
            + "\nChange these lines, or give your converters: custom_convert_map={...}."
        )


def text_of(problems: Iterable[Problem]) -> str:
    """Return a list of problems as text."""
    unique: dict[tuple[str, str], Problem] = {}
    for entry in problems:
        unique.setdefault((entry.operator, entry.line), entry)
    return "\n".join(
        f"  {entry.operator}: {entry.reason}\n    at {entry.line}" for entry in unique.values()
    )
