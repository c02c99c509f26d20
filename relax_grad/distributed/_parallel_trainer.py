"""A trainer whose steps run on all workers of a session."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tvm

from .._validation import check_integer, described
from ..ir.compat import dtype_of
from ..ir.signature import GROUPS
from ..training import Optimizer, Trainer, TrainStep, train_step
from ..training.step import shape_of
from ._replica import Layout
from .errors import WorkerError
from .session import Session


class Communication(NamedTuple):
    """The collectives of a worker in one step.

    Attributes
    ----------
    sent : int
        The bytes that the worker gave to them.
    seconds : float
        The time in which one was under way, including the wait for other workers.
    waited : float
        The time in which the worker computed nothing because of one.
    """

    sent: int
    seconds: float
    waited: float

    @property
    def hidden(self) -> float:
        """The share of the time that overlaps with computations; 0 without collectives."""
        return 1.0 - self.waited / self.seconds if self.seconds > 0 else 0.0


class ParallelTrainer(Trainer):
    """A trainer whose steps run on all workers of a session.

    Attributes
    ----------
    session : Session
        The workers.
    train_step : TrainStep
        The step of one worker with everything.
    parallel_step : TrainStep
        The step that each worker runs, with its collectives.
    communication : list[Communication]
        The collectives of each worker in the last step.
    """

    #: Whether the first metric of the step is the loss of a worker's share.
    _has_own_loss = False

    def __init__(
        self,
        step: TrainStep,
        parallel: TrainStep,
        session: Session,
        layouts: Mapping[str, list[Layout]],
        check_every: int,
        **options: Any,
    ):
        self.session, self.parallel_step = session, parallel
        self._check_every, self._name = check_every, f"replica {id(self)}"
        self._layouts = {
            name: layouts.get(name) or [None] * len(getattr(step, name)) for name in GROUPS
        }
        self.own_losses: list[float] = []
        self.communication: list[Communication] = []
        super().__init__(step, **options)
        self._take(self._moment)

    def _compiled(self, step: TrainStep) -> tvm.runtime.Executable:
        return super()._compiled(self.parallel_step)

    def _started(self) -> Mapping:
        with tempfile.TemporaryDirectory(prefix="relax_grad_") as folder:
            path = Path(folder, "step.so")
            self._executable.export_library(str(path))
            library = f"{self._name}/library"
            self.session.run("share_file", path=str(path), name=library)
            self.session.run("replica", name=self._name, library=library)
        return _Machine(super()._started(), self._run)

    def _take(self, moment: Any) -> None:
        """Give the tensors of a state to all workers, and take it with worker 0's part of those
        that are divided."""
        # Until all workers have it, a state would be partly the old one.
        self._begin_to_take(moment)
        inbox = self.session.inbox
        inbox["groups"] = {name: list(moment.groups[name]) for name in GROUPS}
        types = {
            name: [[list(tensor.shape), str(tensor.dtype)] for tensor in moment.groups[name]]
            for name in GROUPS
        }
        self.session.run("share_tensors", name=self._name, types=types, layouts=self._layouts)
        super()._take(moment._replace(groups=inbox.pop("groups")))

    def _group(self, name: str) -> dict:
        if not any(layout is not None for layout in self._layouts[name]):
            return super()._group(name)
        kinds = getattr(self.train_step, name).values()
        types = [[list(shape_of(kind)), dtype_of(kind)] for kind in kinds]
        inbox = self.session.inbox
        inbox["parts"] = list(self._settled().groups[name])
        self.session.run("gather_tensors", name=self._name, group=name, types=types)
        return dict(zip(getattr(self.train_step, name), inbox.pop("wholes"), strict=True))

    def _run(self, function: str, *arguments: Any) -> Any:
        """Run a function of the step on all workers, and return the result of worker 0."""
        count, numbers = len(self.train_step.batch), len(self.train_step.hyperparameters)
        batch = [tensor.numpy() for tensor in arguments[:count]]
        scalars = [float(tensor.numpy()).hex() for tensor in arguments[count : count + numbers]]
        inbox = self.session.inbox
        inbox["batch"] = batch
        inbox["groups"] = dict(zip(GROUPS, arguments[count + numbers + 1 :], strict=True))
        described = [
            self._described(name, array)
            for name, array in zip(self.train_step.batch, batch, strict=True)
        ]
        # The step is under way, so that the trainer has no separate state.
        moment = self._moment
        compare = self._check_every > 0 and (moment.steps + 1) % self._check_every == 0
        results = self.session.run(
            "step",
            name=self._name,
            function=function,
            batch=described,
            scalars=scalars,
            seed=int(arguments[count + numbers].numpy()),
            has_own_loss=self._has_own_loss,
            compare=compare,
            undo=moment.is_rejected,
        )
        loss, metrics, *others = inbox.pop("result")
        if compare:
            self._compare([result["digests"] for result in results])
        self.own_losses = [float(result["own"]) for result in results]
        self.communication = [Communication(*result["communication"]) for result in results]
        return (loss, list(metrics)[1:] if self._has_own_loss else metrics, *others)

    def _described(self, name: str, array: np.ndarray) -> list:
        """Return the shape, the dtype and the ranges of shares of an input; None for these if all
        workers get the whole."""
        return [list(array.shape), str(array.dtype), None]

    def _compare(self, digests: list[list[str]]) -> None:
        """Compare the digests of tensors that all workers have, and of parts with the same
        place in a group."""
        size = self.session.num_workers // self.session.num_groups
        for rank, (whole, parts) in enumerate(digests):
            for other, differ in (
                (0, whole != digests[0][0]),
                (rank % size, parts != digests[rank % size][1]),
            ):
                if differ:
                    cause = (
                        f"its parameters or states differ from worker {other} after "
                        f"step {self._moment.steps}; load the last checkpoint, and check that all "
                        "machines have the same processors and libraries"
                    )
                    raise WorkerError(rank, self.session.hosts[rank], cause)

    def export(
        self,
        folder: str | os.PathLike,
        *,
        target: tvm.target.Target | str | Mapping | Sequence | None = None,
        **options: Any,
    ) -> None:
        """Write a folder for programs without Python: the step of one worker, with the state of
        this moment.

        Parameters
        ----------
        folder, target, **options
            As for :meth:`relax_grad.training.Trainer.export`.
        """
        target = self.target if target is None else target
        super().export(folder, target=target, **options)


def check_session(session: object) -> None:
    """Check that an argument is a session."""
    if not isinstance(session, Session):
        raise TypeError(
            "session must be a result of relax_grad.distributed.session, but it is "
            f"{described(session)}; write with session(2) as workers: ..., and pass workers"
        )


def check_interval(check_every: object) -> int:
    """Return a number of steps, or raise an error for another value."""
    return check_integer("check_every", check_every, 0, of="steps")


def as_step(
    model: object,
    optimizer: Optimizer | Mapping[str, Optimizer] | None,
    options: Mapping,
    kind: str,
) -> TrainStep:
    """Return a step, or make it of a model."""
    if isinstance(model, TrainStep):
        if optimizer is not None or options:
            argument = "optimizer" if optimizer is not None else next(iter(options))
            raise ValueError(f"{argument} is for models; a step has all of them already")
        step = model
    else:
        # Of None, train_step says what it must be.
        step = train_step(model, optimizer, **options)  # type: ignore[arg-type]
    if step.outputs:
        raise ValueError(f"outputs: a {kind} step returns no outputs; make it without them")
    return step


class _Machine(Mapping):
    """The functions of a step: those that train run on all workers, and the others in this
    process."""

    def __init__(self, here: Mapping, run: Callable):
        self._here, self._run = here, run

    def __getitem__(self, name: str) -> Callable:
        if name in ("step", "accumulate"):
            return lambda *arguments: self._run(name, *arguments)
        if name.endswith("_memory"):  # workers take the memory of their shares within the step
            raise KeyError(name)
        return self._here[name]

    def __iter__(self) -> Iterator[str]:
        return iter(("step", "accumulate"))

    def __len__(self) -> int:
        return 2
