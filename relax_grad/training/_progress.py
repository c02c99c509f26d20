"""A progress bar."""

from __future__ import annotations

from .._progress import host


class Bar:
    """A progress bar of rich, or none: the line of an epoch, below the lines of the complete
    ones."""

    def __init__(self, wanted: bool):
        self._bar = self._task = None
        if wanted:
            try:
                from rich.progress import (
                    BarColumn,
                    MofNCompleteColumn,
                    Progress,
                    TextColumn,
                    TimeRemainingColumn,
                )
            except ImportError:
                return
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("loss {task.fields[loss]}"),
            )

    def __enter__(self) -> Bar:
        if self._bar is not None:
            self._bar.start()
            host(self._bar)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            host(None)
            self._bar.stop()

    def begin(self, title: str, count: int | None, done: int) -> None:
        if self._bar is not None:
            self._title = title
            self._task = self._bar.add_task(title, total=count, completed=done, loss="")

    def advance(self, loss: float) -> None:
        if self._bar is not None:
            self._bar.update(self._task, advance=1, loss=f"{loss:.4g}")

    def end(self, values: dict[str, float]) -> None:
        """Write the values of an epoch instead of its bar. More bars than lines of the
        terminal would hide the last."""
        if self._bar is not None:
            self._bar.remove_task(self._task)
            self._task = None
            shown = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
            self._bar.console.print(f"{self._title}: {shown}", highlight=False)
