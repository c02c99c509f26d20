"""The course of training, which files of its state hold."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from .._packages import load

#: The integers of a trainer that files hold.
COUNTERS = ("seed", "steps", "updates", "skipped", "epoch", "batch")

#: The largest seed, the upper half of the seed of a step, and the largest other counter, up to
#: which every reader of JSON has the integers. runtime/state.cc has both as well.
MOST_SEED, MOST_COUNT = 2**31 - 1, 2**53

#: The steps of a history. Beyond it, every second one of the older three quarters is left out.
MOST_STEPS = 1 << 20


#: The columns of numbers, which have the same length.
_COLUMNS = ("step", "epoch", "loss", "lr", "seconds")


@dataclass
class History:
    """The course of training.

    A history of more than 2 ** 20 steps is thinned: every second record of the older three quarters
    is left out, and so again when it grows. ``step`` tells which steps are there.

    Attributes
    ----------
    step, epoch : list[int]
        The number of each step, from 0, and its epoch.
    loss, lr, seconds : list[float]
        The loss, the learning rate (the first one of several), and the time of each step.
    metrics : dict[str, list[float]]
        The metrics of each step.
    evaluations : list[dict]
        The results of ``fit``'s evaluations, with their epochs.
    """

    step: list[int] = field(default_factory=list)
    epoch: list[int] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    lr: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    metrics: dict[str, list[float]] = field(default_factory=dict)
    evaluations: list[dict] = field(default_factory=list)

    def plot(self, path: str | os.PathLike) -> None:
        """Draw the loss of each step, and write the picture to a file.

        Parameters
        ----------
        path : str or os.PathLike
            The file; its suffix is the format.
        """
        load("matplotlib", "the picture of the loss")
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.add_subplot()
        axes.plot(self.step, self.loss, linewidth=0.8, alpha=0.5, label="loss of the step")
        width = max(1, len(self.loss) // 50)
        if width > 1:
            mean = np.convolve(self.loss, np.ones(width) / width, "valid")
            axes.plot(self.step[width - 1 :], mean, label=f"mean of {width} steps")
        axes.set_xlabel("step")
        axes.set_ylabel("loss")
        axes.legend()
        figure.savefig(path)


def lengths_of(history: History) -> dict[str, int]:
    """Return the numbers of records, for :func:`record`: of the columns, and of the metrics."""
    columns = {name: len(getattr(history, name)) for name in _COLUMNS}
    return {**columns, **{f"/{name}": len(values) for name, values in history.metrics.items()}}


def record(
    history: History,
    lengths: Mapping[str, int],
    step: int,
    epoch: int,
    loss: float,
    lr: float,
    seconds: float,
    metrics: Mapping[str, float],
) -> None:
    """Add a step to a history of these lengths, and thin it if it is long.

    A call that was interrupted may be repeated: it writes the same records again.
    """
    for name, value in zip(_COLUMNS, (step, epoch, loss, lr, seconds), strict=True):
        getattr(history, name)[lengths[name] :] = [value]
    for name, value in metrics.items():
        history.metrics.setdefault(name, [])[lengths.get(f"/{name}", 0) :] = [value]
    thin(history)


def thin(history: History) -> None:
    """Leave out every second record of the older three quarters until there are at most
    :data:`MOST_STEPS`."""
    recent = MOST_STEPS // 4

    def thinned(column: list) -> list:
        return [*column[:-recent:2], *column[-recent:]]

    while len(history.step) > MOST_STEPS:
        columns: dict = {name: thinned(getattr(history, name)) for name in _COLUMNS}
        columns["metrics"] = {name: thinned(values) for name, values in history.metrics.items()}
        vars(history).update(columns)  # all at once, whatever interrupts it
