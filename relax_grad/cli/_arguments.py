"""Arguments that several commands take: patterns of operators, a target, ``--json`` and
``--verbose``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from .._validation import matches, near_names
from ._text import last_line

if TYPE_CHECKING:
    import tvm

OPERATORS = (
    "relax.nn.conv2d, nn.conv2d, conv2d, or a pattern such as 'nn.*'; by default every operator"
)


def add_json(parser: argparse._ActionsContainer) -> None:
    """Add the option ``--json`` to a parser or a group of options."""
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON value to standard output, and other lines to standard error",
    )


def add_verbose(parser: argparse._ActionsContainer, also: str = "") -> None:
    """Add the option ``--verbose``; ``also`` describes more effects of it."""
    parser.add_argument("--verbose", action="store_true", help=f"show TVM's own messages{also}")


def select(
    patterns: Sequence[str], known: Sequence[str], message: Callable[[str], str]
) -> list[str]:
    """Return the known operators that match the patterns, each once; all of them without patterns.

    Parameters
    ----------
    patterns : Sequence[str]
        Names with or without the prefixes before a dot (``"relax.nn.conv2d"``, ``"nn.conv2d"``,
        ``"conv2d"``). ``*`` stands for any characters and ``?`` for any one character.
    known : Sequence[str]
        The names of the operators.
    message : Callable[[str], str]
        Returns the error message for a pattern that matches no operator.

    Raises
    ------
    ValueError
        If a pattern matches no operator.
    """
    if not patterns:
        return list(known)
    selected = []
    for pattern in patterns:
        fitting = [name for name in known if fits(name, pattern)]
        if not fitting:
            raise ValueError(message(pattern))
        selected += fitting
    return list(dict.fromkeys(selected))


def fits(name: str, pattern: str) -> bool:
    """Tell whether a pattern matches an operator's name, with or without the prefixes before a
    dot."""
    return matches(name, pattern) or matches(name, f"*.{pattern}")


def no_such_operator(pattern: str, known: Sequence[str], otherwise: str) -> str:
    """Return a message that suggests similar names, or that ends with ``otherwise`` without any."""
    spellings = {}
    for name in known:
        parts = name.split(".")
        spellings.update({".".join(parts[i:]): name for i in range(len(parts))})
    close = near_names(pattern, spellings, 5)
    names = list(dict.fromkeys(spellings[spelling] for spelling in close))
    hint = f"did you mean {' or '.join(names)}?" if names else otherwise
    return f"no operator {pattern!r}; {hint}"


def target_of(text: str) -> tvm.target.Target:
    """Return the target of a name or of JSON; raise ValueError if it or its device does not
    exist."""
    import tvm

    from ..cpu.target import host

    try:
        if text == "host":
            return host()
        target = tvm.target.Target(json.loads(text) if text.startswith("{") else text)
        device = tvm.runtime.Device(target.get_target_device_type(), 0)
    except Exception as error:
        raise ValueError(f"argument --target: no target {text!r}: {last_line(error)}") from error
    if not device.exist:
        raise ValueError(f"argument --target: no device of target {text!r} on this machine")
    return target


def positive(kind: type) -> Callable[[str], object]:
    """Return a function for argparse that converts a text to a positive number of this type."""

    def convert(text: str) -> object:
        value = kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"it must be positive, not {text}")
        return value

    convert.__name__ = kind.__name__
    return convert
