"""The loop over epochs and batches, for a ``Trainer``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized

import numpy as np

from .._validation import check_call, check_integer, described
from ._ahead import Ahead, Scheduler, ahead_of, parts_of, step_of
from ._feed import Feed
from ._inputs import NO_BATCH, check_loader, result_of
from ._progress import Bar
from ._slots import LR, Hyperparameter
from ._steps import InSteps
from .step import StepResult

_EVALUATE = "lambda trainer: trainer.evaluate(loader, metrics)"


class Loop:
    """The loop of :meth:`Trainer.fit`, whose arguments it takes."""

    def __init__(
        self,
        trainer: InSteps,
        loader: Iterable,
        schedule: Callable[[int], float] | Scheduler | None,
        callbacks: Sequence[Callable],
        evaluate: Callable | None,
        patience: int | None,
        monitor: str,
        ahead: int | None = None,
    ):
        self._trainer, self._loader = trainer, loader
        self._scheduler = schedule if isinstance(schedule, Scheduler) else None
        self._schedule = None if isinstance(schedule, Scheduler) else schedule
        self._callbacks, self._evaluate = callbacks, evaluate
        self._patience, self._monitor = patience, monitor
        kinds = [kind.__name__ for kind in type(schedule).__mro__]
        #: The scheduler that takes the monitored value after each epoch, if it is one.
        self._plateau = self._scheduler if "ReduceLROnPlateau" in kinds else None
        self._check()
        self._feed = trainer._at.feed(ahead_of(ahead, callbacks, self._scheduler))

    def _check(self) -> None:
        patience, schedule = self._patience, self._schedule
        if patience is not None:
            check_integer("patience", patience, 1, of="epochs", also="None")
        if self._monitor != "loss" and self._evaluate is None:
            raise ValueError(
                f"monitor: {self._monitor!r} needs evaluate, which returns it, such as evaluate="
                "lambda trainer: trainer.evaluate(loader, metrics)"
            )
        if schedule is not None and not callable(schedule):
            raise TypeError(
                "schedule must be a function of the number of the update, or a scheduler of "
                f"torch.optim.lr_scheduler, but it is {described(schedule)}"
            )
        if callable(self._callbacks) or not all(map(callable, self._callbacks)):
            raise TypeError(
                "callbacks must be a list of functions of the trainer, such as [callback], but it "
                f"is {self._callbacks!r}"
            )
        _check_sequence(self._scheduler)
        if schedule is not None:
            check_call("schedule", schedule, [0], "lambda update: 0.1 * 0.99**update")
        for callback in self._callbacks:
            check_call(
                "each of callbacks", callback, [None], "lambda trainer: print(trainer.epoch)"
            )
        check_loader(self._loader, self._trainer.train_step.batch)
        if self._evaluate is not None and not callable(self._evaluate):
            raise TypeError(
                "evaluate must be a function of the trainer, such as lambda trainer: "
                "trainer.evaluate(loader, metrics), but it is "
                f"{described(self._evaluate)}"
            )
        if self._evaluate is not None:
            check_call("evaluate", self._evaluate, [None], _EVALUATE)

    def run(self, epochs: int | None, progress: bool) -> None:
        """Train until ``epochs`` epochs are complete; with None, until one more is."""
        trainer = self._trainer
        if epochs is None:
            epochs = trainer.epoch + 1
        epochs = check_integer("epochs", epochs, 0, of="epochs")
        loaded_epoch = trainer._settled().loaded_epoch
        if loaded_epoch < trainer.epoch >= epochs:
            raise ValueError(
                f"epochs counts from the first one, and {trainer.epoch} are complete, but epochs "
                f"is {epochs}: pass a larger number, or leave it out for one more epoch"
            )
        if isinstance(self._loader, Iterator) and epochs > trainer.epoch + 1:
            raise ValueError(
                "loader gives its batches only once, as generators do; for several epochs, pass "
                "a list or an object that begins anew at each iteration"
            )
        self._restore_rates()
        patience = _Patience(self._patience)
        is_over = False
        for earlier in self._earlier:
            is_over = patience.note(earlier.get(self._monitored))
        if loaded_epoch == trainer.epoch:
            if is_over:  # before the file was saved
                return
            self._catch_up()
        with Bar(progress) as bar:
            while trainer.epoch < epochs:
                if not self._epoch(f"epoch {trainer.epoch + 1}/{epochs}", bar):
                    break
                evaluation = self._evaluated()
                bar.end({name: value for name, value in evaluation.items() if name != "epoch"})
                value = self._value(evaluation)
                # The epoch is complete when all that follows it has succeeded.
                trainer._end_epoch(evaluation)
                if self._plateau is not None:
                    self._plateau.step(value)
                if patience.note(value):
                    break

    def _restore_rates(self) -> None:
        """Write the last rates of a scheduler to its optimizer.

        Most schedulers compute the next rate from the optimizer's, which the state of a scheduler
        lacks: after ``load_state_dict`` the optimizer has its first rate again.
        """
        groups = getattr(getattr(self._scheduler, "optimizer", None), "param_groups", ())
        for group, rate in zip(groups, self._rates() if groups else (), strict=False):
            if hasattr(group["lr"], "fill_"):  # a tensor, which compiled optimizers share
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _rates(self) -> Sequence[float]:
        assert self._scheduler is not None
        return self._scheduler.get_last_lr()

    def _catch_up(self) -> None:
        """Give a new scheduler of plateaus the values of the epochs before the file was saved."""
        if self._plateau is not None and not getattr(self._plateau, "last_epoch", 1):
            for earlier in self._earlier:
                if self._monitored in earlier:
                    self._plateau.step(earlier[self._monitored])

    @property
    def _earlier(self) -> list[dict[str, float]]:
        """The evaluations of complete epochs."""
        trainer = self._trainer
        evaluations = trainer.history.evaluations
        return [each for each in evaluations if each.get("epoch", -1) < trainer.epoch]

    @property
    def _monitored(self) -> str:
        return "mean_loss" if self._monitor == "loss" else self._monitor

    def _evaluated(self) -> dict[str, float]:
        trainer = self._trainer
        evaluation = {"epoch": trainer.epoch, "mean_loss": self._mean_loss()}
        if self._evaluate is None:
            return evaluation
        results = self._evaluate(trainer)
        if not isinstance(results, Mapping):
            raise TypeError(
                f"evaluate must return numbers by their names, as {_EVALUATE} does, but it "
                f"returns {described(results)}"
            )
        for name, value in results.items():
            # Files hold the history, which takes numbers of Python.
            evaluation[name] = result_of(
                f"evaluate must return numbers, but its {name!r} is", value
            )
        return evaluation

    def _value(self, evaluation: Mapping[str, float]) -> float | None:
        if self._patience is None and self._plateau is None:
            return None
        if self._monitored not in evaluation:
            names = [name for name in evaluation if name not in ("epoch", "mean_loss")]
            raise ValueError(
                f"monitor: evaluate returns no {self._monitor!r}; it returns "
                f"{', '.join(names) or 'nothing'}"
            )
        return evaluation[self._monitored]

    def _mean_loss(self) -> float:
        """Return the mean loss of the epoch, without skipped steps whose loss is infinite or
        NaN."""
        history = self._trainer.history
        losses = [
            loss
            for loss, epoch in zip(history.loss, history.epoch, strict=True)
            if epoch == self._trainer.epoch and math.isfinite(loss)
        ]
        return float(np.mean(losses)) if losses else math.nan

    def _epoch(self, title: str, bar: Bar) -> bool:
        """Run the rest of an epoch; return whether to go on."""
        trainer, loader = self._trainer, self._loader
        #: The scheduler that steps after each update, if there is one.
        scheduler = self._scheduler if self._plateau is None else None
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(trainer.epoch)
        count = len(loader) if isinstance(loader, Sized) else None
        bar.begin(title, count, trainer.batch)
        seen = 0
        if self._feed is not None:
            seen = self._epoch_ahead(self._feed, scheduler, bar)
        else:
            for batch in loader:
                seen += 1
                if seen <= trainer.batch:  # before the file was saved
                    continue
                before = trainer.updates
                # The step and the batch count at once.
                trainer._place = trainer.steps, trainer.batch + 1
                try:
                    result = self._step(batch)
                finally:
                    trainer._place = None
                bar.advance(result.loss)
                if scheduler is not None and trainer.updates > before:
                    step_of(scheduler)
                if any([callback(trainer) is True for callback in self._callbacks]):  # noqa: C419 (each is called)
                    return False
        if not seen:
            raise ValueError(f"the loader gave no batch; {NO_BATCH}")
        if seen < trainer.batch:
            raise ValueError(
                f"the loader gave {seen} batches, but {trainer.batch} of the epoch are done; it "
                "must be the loader that training began with"
            )
        return True

    def _epoch_ahead(self, feed: Feed, scheduler: Scheduler | None, bar: Bar) -> int:
        """Run the rest of an epoch on a device that runs after the host; return the number of
        batches."""
        trainer, seen = self._trainer, 0
        with Ahead(trainer, feed, self._settings, scheduler, bar.advance) as steps:
            for batch in self._loader:
                seen += 1
                if seen > trainer._moment.expected().batch:
                    steps.begin(batch)
        return seen

    def _step(self, batch: object) -> StepResult:
        trainer = self._trainer
        values, named = parts_of(batch)
        return trainer.step(*values, **{**named, **self._settings(trainer.updates)})

    def _settings(self, update: int) -> dict[str, float]:
        """Return the learning rates of an update."""
        trainer, settings = self._trainer, {}
        if self._scheduler is not None:
            hyperparameters = trainer.train_step.hyperparameters
            names = [name for name in hyperparameters if Hyperparameter.parse(name).kind == LR]
            rates = self._rates()
            if len(rates) != len(names):
                raise ValueError(
                    f"the scheduler has {len(rates)} groups of parameters, but the step has "
                    f"{len(names)}: {', '.join(names)}"
                )
            settings = dict(zip(names, map(float, rates), strict=True))
        elif self._schedule is not None:
            rate = self._schedule(update)
            settings = {"lr": result_of("schedule must return a number, but it returns", rate)}
        return settings


def _check_sequence(scheduler: object) -> None:
    """Raise ValueError if PyTorch would end training at a milestone of a SequentialLR: it cannot
    set a later scheduler that has schedulers itself to the first rate."""
    inner = getattr(scheduler, "_schedulers", ())
    names = [kind.__name__ for kind in type(scheduler).__mro__]
    for place, part in enumerate(inner):
        # The class that defines it first is their base, which raises the error.
        owner = next((k.__name__ for k in type(part).__mro__ if "get_lr" in vars(k)), None)
        if owner == "LRScheduler" and place and "SequentialLR" in names:
            raise ValueError(
                f"schedule: a SequentialLR has a {type(part).__name__} as scheduler {place}, which "
                "PyTorch supports as scheduler 0 only; write one SequentialLR with all schedulers "
                "and milestones, as SequentialLR(optimizer, [first, second, third], [3, 5]), or a "
                "LambdaLR"
            )
        _check_sequence(part)


class _Patience:
    """The epochs without a lower value."""

    def __init__(self, most: int | None):
        self._most, self._best, self._bad = most, math.inf, 0

    def note(self, value: float | None) -> bool:
        """Return whether the value, the newest one, ends training; None is no value."""
        if self._most is None or value is None:
            return False
        if value < self._best:
            self._best, self._bad = value, 0
            return False
        self._bad += 1
        if self._bad < self._most:
            return False
        self._bad = 0  # training may be continued by another call
        return True
