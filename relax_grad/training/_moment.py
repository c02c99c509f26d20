"""The state of a trainer at one moment, which a step changes as a whole or not at all.

A step writes new tensors to the memory of the old ones, and after that the trainer counts it. An
interrupt may come between any two bytecodes, and a failure within the step. So the step under way
is a part of the moment before it. Its function is called, and its results are noted, in one call
of C, which no interrupt divides. What follows is computed from these results alone: if it is
interrupted, the next use of the trainer computes it again. One assignment ends the step.

On a device, several steps may be under way: each is called with the tensors of the one before it,
and their results are read in order. If a step is not finite, the later ones change nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import starmap
from operator import length_hint
from typing import Any, NamedTuple, Protocol

import numpy as np
import tvm

from .._validation import check_integer
from ..errors import BrokenTrainerError
from ._outcome import OUTCOMES, Outcome
from .history import MOST_COUNT, MOST_SEED, History, lengths_of, record


class Reading(Protocol):
    """Scalars on their way from a device."""

    def wait(self) -> None:
        """Wait until the step has ended."""

    def arrays(self) -> Sequence[np.ndarray]:
        """Return them as arrays, when they have arrived."""


class Call:
    """A step under way.

    Parameters
    ----------
    function, arguments : Callable, Sequence
        The compiled function and its arguments.
    metrics : Sequence[str]
        The names of the metrics.
    updates : bool
        Whether the step updates the parameters, and does not only add its gradient to a sum.
    skips : bool
        Whether a step that is not finite is skipped; otherwise the trainer stays as it is.
    rate : float
        The learning rate.
    batch : int
        The batches of the epoch after the step.
    start : float
        The time at which it began, in seconds.

    Attributes
    ----------
    reading : Reading or None
        The loss and the metrics on their way from the device; without it, they are copied when
        they are needed.
    outcome : Outcome or None
        The outcome, when the results have been read.
    """

    reading: Reading | None = None
    outcome: Outcome | None = None

    def __init__(
        self,
        function: Callable,
        arguments: Sequence,
        *,
        metrics: Sequence[str],
        updates: bool,
        skips: bool,
        rate: float,
        batch: int,
        start: float,
    ):
        self._function, self._arguments = function, iter([arguments])
        self._results: list = []
        self._numbers: tuple[float, dict[str, float]] | None = None
        self._lengths: Mapping[str, int] | None = None
        self._metrics, self.updates, self._skips = metrics, updates, skips
        self._rate, self._batch, self.start = rate, batch, start

    def run(self) -> None:
        """Call the function, and note its results."""
        try:
            self._results.extend(starmap(self._function, self._arguments))
        except BaseException as error:
            if hasattr(error, "add_note") and self.is_broken:  # Python 3.11
                error.add_note(f"The step did not end: {BROKEN}.")
            raise

    @property
    def is_begun(self) -> bool:
        return not length_hint(self._arguments)

    @property
    def is_broken(self) -> bool:
        """Whether the function was called and has not returned."""
        return self.is_begun and not self._results

    @property
    def scalars(self) -> Sequence[tvm.runtime.Tensor]:
        """The loss and the metrics as tensors."""
        loss, metrics, *_ = self._results[0]
        return [loss, *metrics]

    @property
    def outputs(self) -> Sequence[tvm.runtime.Tensor]:
        return self._results[0][2]

    @property
    def further(self) -> Sequence[tvm.runtime.Tensor]:
        """The results after the groups of tensors."""
        return self._results[0][6:]

    def wait(self) -> None:
        """Wait until the step has ended, if it was called."""
        if self.reading is not None:
            self.reading.wait()
        elif self._results:
            self.results()

    def results(self) -> tuple[float, dict[str, float]]:
        """Return the loss and the metrics, when the step has ended."""
        if self._numbers is None:
            reading = self.reading
            arrays = [x.numpy() for x in self.scalars] if reading is None else reading.arrays()
            loss, *metrics = (float(array.reshape(())) for array in arrays)
            self._numbers = loss, dict(zip(self._metrics, metrics, strict=True))
        return self._numbers

    @property
    def is_rejected(self) -> bool:
        """Whether the step is an error, and everything is as before it."""
        return _outcome(*self.results()).raises and not self._skips

    @property
    def is_applied(self) -> bool:
        """Whether later steps were called as they had to be: with its results, and counted."""
        return _outcome(*self.results()) == OUTCOMES[True, True, False]

    def error(self, step: int) -> FloatingPointError:
        """Return the error of a rejected step of this number."""
        loss, _ = self.results()
        cause = "a gradient is not finite" if math.isfinite(loss) else f"the loss is {loss}"
        return FloatingPointError(
            f"{cause} in step {step}; everything is as before the step. Lower the "
            "learning rate, clip the gradients, "
            'or skip such batches with on_nan="skip"'
        )

    def _new_groups(self, moment: Moment) -> Mapping[str, Sequence[tvm.runtime.Tensor]]:
        new = zip(("params", "states", "optimizer_state"), self._results[0][3:6], strict=True)
        return {**moment.groups, **dict(new)}

    def expected(self, moment: Moment) -> Moment:
        """Return the moment after the step if it is applied, before its results are known."""
        return moment._replace(
            groups=self._new_groups(moment),
            steps=moment.steps + 1,
            updates=moment.updates + self.updates,
            batch=self._batch,
        )

    def after(self, moment: Moment) -> Moment:
        """Return the moment after the step, whose history has the step already."""
        self.outcome = outcome = _outcome(*self.results())
        if self.is_rejected:
            return moment._replace(is_rejected=True)
        loss, metrics = self.results()
        groups = self._new_groups(moment) if outcome.takes_results else moment.groups
        if self._lengths is None:
            self._lengths = lengths_of(moment.history)
        seconds = time.perf_counter() - self.start
        numbers = moment.steps, moment.epoch, loss, self._rate, seconds
        record(moment.history, self._lengths, *numbers, metrics)
        return moment._replace(
            groups=groups,
            steps=moment.steps + 1,
            skipped=moment.skipped + outcome.is_skipped,
            updates=moment.updates + (self.updates and outcome.is_applied),
            batch=self._batch,
            is_rejected=False,
        )


class Moment(NamedTuple):
    """The state of a trainer between two steps, and the steps that are under way.

    Attributes
    ----------
    groups : dict[str, Sequence[tvm.runtime.Tensor]]
        The tensors of each group.
    history : History
        The course of training.
    seed, steps, updates, skipped, epoch, batch : int
        The counters.
    loaded_epoch : int
        The epochs that were complete in the last file that was loaded.
    calls : tuple[Call, ...]
        The steps that are under way, or that were interrupted, in order.
    is_rejected : bool
        Whether the last step was an error, and left everything as it was.
    """

    groups: Mapping[str, Sequence[tvm.runtime.Tensor]]
    history: History
    seed: int
    steps: int = 0
    updates: int = 0
    skipped: int = 0
    epoch: int = 0
    batch: int = 0
    loaded_epoch: int = 0
    calls: tuple[Call, ...] = ()
    is_rejected: bool = False

    def after_call(self) -> Moment:
        """Return the moment after the first of the steps under way, if its function has returned.

        If that step is not applied, the later ones have changed nothing and are dropped.

        Raises
        ------
        BrokenTrainerError
            If the function was called and has not returned.
        """
        call, *others = self.calls
        if call.is_broken:
            raise BrokenTrainerError(f"the last step did not end: {BROKEN}")
        if not call.is_begun:
            return self._replace(calls=())
        moment = call.after(self)
        if call.is_applied:
            now = time.perf_counter()
            for other in others[:1]:
                other.start = max(other.start, now)
            return moment._replace(calls=tuple(others))
        for other in others:
            other.wait()
        return moment._replace(calls=())

    def expected(self) -> Moment:
        """Return the moment after the steps under way if all are applied."""
        moment = self
        for call in self.calls:
            moment = call.expected(moment)
        return moment


#: The state after a step that did not end.
BROKEN = (
    "its parameters, states and counters may be partly those before it and partly those after it; "
    "load a saved state with Trainer.load, or make a new trainer"
)


class _Unfinished(Call):
    """A call that did not return."""

    def __init__(self) -> None:
        self._arguments, self._results = iter([]), []


#: The call of a trainer whose state was taken in part only.
_UNFINISHED = _Unfinished()


def _outcome(loss: float, metrics: Mapping[str, float]) -> Outcome:
    is_applied = metrics.get("applied", 1.0) == 1.0
    return OUTCOMES[math.isfinite(loss), is_applied, "loss_scale" in metrics]


def _field(name: str, doc: str) -> Any:
    """Return a property for a field of a trainer's moment."""

    def get(trainer: InMoments) -> object:
        return getattr(trainer._settled(), name)

    def set_(trainer: InMoments, value: object) -> None:
        if name != "history":
            # Files have no others.
            value = check_integer(name, value, 0, MOST_SEED if name == "seed" else MOST_COUNT)
        fields: dict[str, Any] = {name: value}
        trainer._moment = trainer._settled()._replace(**fields)

    return property(get, set_, doc=doc)


class InMoments:
    """A trainer whose state is a :class:`Moment`."""

    _moment: Moment
    #: The number of a step, and the batches of the epoch after it, which a loop counts.
    _place: tuple[int, int] | None = None

    seed = _field("seed", "The seed of the random numbers.")
    steps = _field("steps", "The number of batches.")
    updates = _field("updates", "The number of updates.")
    skipped = _field("skipped", "The number of skipped steps.")
    epoch = _field("epoch", "The number of complete epochs.")
    batch = _field("batch", "The number of batches of the epoch that has begun.")
    history = _field("history", "The course of training.")

    def __repr__(self) -> str:
        return f"{type(self).__name__}(steps: {self._moment.steps}; epochs: {self._moment.epoch})"

    def _settled(self) -> Moment:
        """Return the state after the last step, which is completed if it was interrupted after its
        function had returned."""
        while self._moment.calls:
            self._moment = self._moment.after_call()
        return self._moment

    def _wait(self) -> None:
        """Wait until the steps under way have ended."""
        for call in self._moment.calls:
            call.wait()

    def _settle(self, call: Call) -> None:
        """Read the results of the steps up to this one."""
        while any(each is call for each in self._moment.calls):
            self._moment = self._moment.after_call()

    def _take(self, moment: Moment) -> None:
        """Take another state."""
        self._moment = moment

    def _begin_to_take(self, moment: Moment) -> None:
        """Note that another state is taken in parts, until :meth:`_take` has all of them."""
        self._moment = moment._replace(calls=(_UNFINISHED,))

    def _batch_after(self, moment: Moment) -> int:
        """Return the batches of the epoch after the next step."""
        place = self._place
        return place[1] if place is not None and place[0] == moment.steps else moment.batch

    def _end_epoch(self, evaluation: dict) -> None:
        """Count an epoch, with its evaluation."""
        moment = self._settled()
        evaluations = moment.history.evaluations
        count = len(evaluations)
        # An interrupt came after it.
        if count and evaluations[-1].get("epoch") == moment.epoch:
            count -= 1
        evaluations[count:] = [evaluation]
        self._moment = moment._replace(epoch=moment.epoch + 1, batch=0)
