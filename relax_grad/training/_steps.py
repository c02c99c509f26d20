"""The steps of a ``Trainer``, from a batch to the call of a compiled function."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence

import numpy as np
import tvm

from ..ir.signature import GROUPS, MODEL_GROUPS
from ._allocator import Allocator
from ._device import Place
from ._feed import Feed
from ._inputs import named_values, scalars_of
from ._moment import Call, InMoments, Moment
from ._outcome import is_update
from ._prediction import averages_of
from ._tensors import Tensors
from ._variant import Variant, Variants
from .step import StepResult, TrainStep


class InSteps(InMoments):
    """A trainer whose steps are calls of compiled functions."""

    train_step: TrainStep
    on_nan: str
    _at: Place
    _lock: threading.RLock
    _allocator: Allocator
    _variants: Variants

    def step(self, *batch: object, lr: float | None = None, **others: object) -> StepResult:
        """Run one training step; see :meth:`Trainer.step`."""
        raise NotImplementedError  # Trainer implements it; loops and evaluations call it

    def predict(
        self, *inputs: object, ema: bool = False
    ) -> tvm.runtime.Tensor | list[tvm.runtime.Tensor]:
        """Return the model's outputs; see :meth:`Trainer.predict`."""
        raise NotImplementedError  # Trainer implements it; evaluations call it

    def _group(self, name: str) -> Tensors:
        names, tensors = getattr(self.train_step, name), self._settled().groups[name]
        return dict(zip(names, tensors, strict=True))

    def _values(self) -> Tensors:
        groups = map(self._group, MODEL_GROUPS)
        return {name: tensor for group in groups for name, tensor in group.items()}

    def _values_of(self, ema: bool) -> Tensors:
        if not ema:
            return self._values()
        averages = averages_of(self._group("params"), self._group("optimizer_state"))
        return {**self._values(), **averages}

    def _step(self, batch: tuple, lr: float | None, others: dict) -> StepResult:
        steps = self._settled().steps
        call = self._begin(batch, lr, others)
        self._settled()
        if call.is_rejected:
            raise call.error(steps)
        outputs = self._at.outputs(call.outputs)
        named = dict(zip(self.train_step.outputs, outputs, strict=True))
        return StepResult(*call.results(), named)

    def _begin(
        self, batch: tuple, lr: float | None, others: dict, feed: Feed | None = None
    ) -> Call:
        """Call the compiled step after the steps under way. With a feed, a device may still compute
        it afterwards."""
        start = time.perf_counter()
        scalars = scalars_of(self.train_step.hyperparameters, lr, others)
        variant, arguments = self._batch(batch, others)
        self._check_extents(variant)
        self._variants.note(variant)
        moment = self._moment.expected()
        updates = is_update(moment.steps, moment.skipped, self.train_step.accumulate)
        name = "step" if updates else "accumulate"
        numbers = (np.array(value, "float64") for value in scalars.values())
        arguments = [
            *arguments,
            *map(tvm.runtime.tensor, (*numbers, self._seed(moment))),
            *(moment.groups[group] for group in GROUPS),
            *self._at.goes_on(moment.calls),
        ]
        function, arguments = self._at.call(variant.machine, name, arguments, feed)
        if arguments:  # a graph has its memory
            self._allocator.take(variant.machine, name, arguments, len(moment.calls))
        call = Call(
            function,
            arguments,
            metrics=self.train_step.metrics,
            updates=updates,
            skips=self.on_nan == "skip",
            rate=next(iter(scalars.values())),
            batch=self._batch_after(moment),
            start=start,
        )
        self._moment = self._moment._replace(calls=(*moment.calls, call))
        call.run()
        if feed is not None:
            feed.follow(call)
        return call

    def _batch(self, batch: Sequence, others: Mapping) -> tuple[Variant, list[tvm.runtime.Tensor]]:
        """Return the step for a batch, and the inputs and targets as tensors."""
        types = self.train_step.batch
        values = self._named(types, batch, others)
        with self._lock:
            variant = self._variants.of_batch(types, values)
        return variant, self._tensors(variant, variant.step.batch, values)

    def _named(self, types: Mapping, batch: Sequence, others: Mapping) -> dict[str, object]:
        """Return inputs and targets by their names."""
        return named_values(types, self.train_step.hyperparameters, batch, others)

    def _tensors(
        self, variant: Variant, types: Mapping, values: Mapping[str, object]
    ) -> list[tvm.runtime.Tensor]:
        """Return inputs and targets as tensors of these types."""
        tensors, symbols = variant.tensors(values, types)
        if symbols != self._allocator.extents:
            self._wait()
        self._allocator.begin(symbols)
        return tensors

    def _check_extents(self, variant: Variant) -> None:
        """Check the symbolic extents of a batch to train with."""
        for check in variant.checks:
            check.check(self._allocator.extents)

    def _seed(self, moment: Moment | None = None) -> np.ndarray:
        """Return the seed of the next step."""
        moment = self._settled() if moment is None else moment
        return np.array((moment.seed << 32) | (moment.steps & 0xFFFFFFFF), "int64")
