"""The display of what takes seconds: a line on the terminal, if rich is installed."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class _Line:
    """The line of the terminal, while it is shown."""

    def __init__(self, bar: Progress, task: TaskID):
        self._bar, self._task = bar, task

    def describe(self, text: str, total: int | None) -> None:
        self._bar.reset(self._task, description=text, total=total)

    def advance(self) -> None:
        self._bar.advance(self._task)


#: The line that is shown, as the only element.
_lines: list[_Line | None] = [None]

#: The bar of a loop, which takes the line as one more element, as the only element.
_hosts: list[Progress | None] = [None]


@contextmanager
def shown(text: str) -> Iterator[None]:
    """Show a text until the end of the block, on standard error if it is a terminal.

    Within another block, nothing changes: the text of the outer one stays. Within the bar of a
    loop, the text is a line below it.
    """
    within = _hosts[0]
    bar = None if _lines[0] is not None else within or _bar()
    if bar is None:
        yield
        return
    with nullcontext() if within else bar:
        task = bar.add_task(text, total=None, loss="")
        _lines[0] = _Line(bar, task)
        try:
            yield
        finally:
            _lines[0] = None
            if within:
                bar.remove_task(task)


def host(bar: Progress | None) -> None:
    """Note the bar of a loop, or its end."""
    _hosts[0] = bar


def describe(text: str, total: int | None = None) -> None:
    """Replace the text that is shown, if any, and count from zero to ``total``."""
    if _lines[0] is not None:
        _lines[0].describe(text, total)


def advance() -> None:
    """Count one of the total."""
    if _lines[0] is not None:
        _lines[0].advance()


def _bar() -> Progress | None:
    stream = sys.stderr
    if stream is None or not stream.isatty() or importlib.util.find_spec("rich") is None:
        return None
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn()
    console = Console(stderr=True)
    return Progress(
        *columns, MofNCompleteColumn(), TimeElapsedColumn(), console=console, transient=True
    )
