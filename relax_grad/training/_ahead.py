"""Steps of a ``Trainer`` on a device that begin before the losses of earlier steps are read.

A step is called as if the steps before it were applied. If one of them was not, the compiled steps
after it have changed nothing; they are forgotten, and called again with the right numbers. So the
results have the same bits as if each step had waited for the one before it.
"""

from __future__ import annotations

import copy
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

from .._validation import check_integer
from ._feed import Feed
from ._moment import Call
from ._steps import InSteps

#: The steps that begin before the loss of an earlier one is read: one for the device to go on with,
#: and one for the time that a loader takes longer than usual.
_DEFAULT = 2


def ahead_of(ahead: object, callbacks: Sequence, scheduler: object = None) -> int:
    """Return the argument ``ahead`` of :meth:`Trainer.fit` as a number. Without a state, a
    scheduler cannot take an update back.

    Raises
    ------
    TypeError, ValueError
        If it is no number, or does not go with callbacks.
    """
    has_state = scheduler is None or hasattr(scheduler, "load_state_dict")
    if ahead is None:
        return _DEFAULT if has_state and not callbacks else 0
    ahead = check_integer("ahead", ahead, 0, of="steps", also="None")
    if ahead and callbacks:
        raise ValueError(
            f"callbacks see the trainer after each step, but ahead={ahead} lets later steps begin: "
            "leave ahead out"
        )
    return ahead if has_state else 0


def parts_of(batch: object) -> tuple[Sequence, Mapping]:
    """Return the tensors of a batch by position, and by name."""
    if isinstance(batch, Mapping):
        return (), batch
    return (batch if isinstance(batch, list | tuple) else (batch,)), {}


@runtime_checkable
class Scheduler(Protocol):
    """A scheduler of ``torch.optim.lr_scheduler``."""

    def step(self, metrics: Any = ...) -> None: ...

    def get_last_lr(self) -> Sequence[float]: ...


class _Restored(Protocol):
    """A scheduler with a state."""

    def state_dict(self) -> dict: ...

    def load_state_dict(self, state_dict: dict) -> None: ...


def step_of(scheduler: Scheduler) -> None:
    """Step a scheduler of PyTorch."""
    with warnings.catch_warnings():
        # Its optimizer takes no step: the compiled function does.
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
        scheduler.step()


class _Begun(NamedTuple):
    """A step under way, and the state of the scheduler before it counted the step."""

    call: Call
    schedule: _Schedule | None


class _Schedule:
    """The state of a scheduler of PyTorch, and the values in the groups of its optimizer."""

    def __init__(self, scheduler: _Restored):
        self._scheduler = scheduler
        self._state = copy.deepcopy(scheduler.state_dict())
        groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", ())
        self._groups = [
            (group, {key: _cloned(value) for key, value in group.items() if key != "params"})
            for group in groups
        ]

    def restore(self) -> None:
        self._scheduler.load_state_dict(self._state)
        for group, values in self._groups:
            for key, value in values.items():
                if hasattr(group[key], "copy_"):  # a tensor, which compiled optimizers share
                    group[key].copy_(value)
                else:
                    group[key] = value


def _cloned(value: Any) -> Any:
    return value.clone() if hasattr(value, "clone") else value


class Ahead:
    """The steps of an epoch, of which a few are under way.

    Parameters
    ----------
    trainer : Trainer
        The trainer, on a device.
    feed : Feed
        Its copies to and from the device.
    settings : Callable
        Returns the learning rates by the number of the update.
    scheduler : scheduler of PyTorch or None
        Steps after each update.
    done : Callable
        Is called with the loss of each step, in order.
    """

    def __init__(
        self,
        trainer: InSteps,
        feed: Feed,
        settings: Callable[[int], dict[str, float]],
        scheduler: Scheduler | None,
        done: Callable[[float], None],
    ):
        self._trainer, self._feed, self._settings = trainer, feed, settings
        self._scheduler, self._done = scheduler, done
        self._begun: deque[_Begun] = deque()

    def __enter__(self) -> Ahead:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        """End the steps under way. An error of a step is from before the error of the loader."""
        if error is None:
            while self._begun:
                self._end()
            return
        while self._begun:
            begun = self._begun.popleft()
            call = begun.call
            with self._trainer._lock:
                self._trainer._settle(call)
            if call.outcome is None or call.is_applied:
                continue
            self._take_back(begun)
            if call.is_rejected and isinstance(error, Exception):
                raise call.error(self._trainer._moment.steps) from error

    def begin(self, batch: object) -> None:
        """Begin the step of a batch, and end the earliest ones."""
        self._begin(*parts_of(batch))
        while len(self._begun) > self._feed.ahead:
            self._end()

    def _begin(self, values: Sequence, named: Mapping) -> None:
        call = None
        while call is None:
            while self._are_read():
                self._end()
            settings = self._settings(self._trainer._moment.expected().updates)
            call = self._called(values, {**named, **settings})
        schedule = None
        if self._scheduler is not None and call.updates:
            schedule = _Schedule(cast(_Restored, self._scheduler))  # see ahead_of
        self._begun.append(_Begun(call, schedule))
        if self._scheduler is not None and schedule is not None:
            step_of(self._scheduler)

    def _are_read(self) -> bool:
        """Tell whether the results of steps were read already, and so those of all: by a loader, a
        schedule or another thread that reads the state of the trainer."""
        return bool(self._begun) and self._begun[0].call.outcome is not None

    def _called(self, values: Sequence, others: dict) -> Call | None:
        """Call a step after the steps under way; return None if their results were read."""
        trainer = self._trainer
        with trainer._lock:
            if self._are_read():
                return None
            moment = trainer._moment.expected()
            trainer._place = moment.steps, moment.batch + 1
            try:
                return trainer._begin(tuple(values), others.pop("lr", None), others, self._feed)
            finally:
                trainer._place = None

    def _end(self) -> None:
        """Read the results of the earliest step under way."""
        trainer = self._trainer
        begun = self._begun.popleft()
        call = begun.call
        with trainer._lock:
            trainer._settle(call)
        if call.outcome is None:  # another state was loaded
            return
        if not call.is_rejected:
            self._done(call.results()[0])
        if call.is_applied:
            return
        count = len(trainer.train_step.batch)
        again = [self._feed.batch(later.call, count) for later in self._begun]
        self._take_back(begun)
        if call.is_rejected:
            raise call.error(trainer._moment.steps)
        for values in again:
            self._begin(values, {})

    def _take_back(self, begun: _Begun) -> None:
        """Forget the steps after one that was not applied, and take back the updates that the
        scheduler counted for them."""
        for schedule in (begun.schedule, *(later.schedule for later in self._begun)):
            if schedule is not None:
                schedule.restore()
                break
        self._begun.clear()
