"""A compiled step with the checks of its arguments."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import tvm
from tvm import relax

from .._progress import shown
from ._device import Place
from ._inputs import as_input, check_ranges, checks_of, ranges_of
from ._loss import Loss
from ._prediction import Prediction
from .step import TrainStep


class Variant:
    """A step as a trainer runs it.

    Parameters
    ----------
    step : TrainStep
        The step.
    machine : Mapping
        Its compiled functions by their names.
    place : Place
        Where its functions run, for the loss without an update.
    check_inputs : bool
        Whether indices and classes are examined.
    """

    def __init__(
        self,
        step: TrainStep,
        machine: Mapping,
        place: Place,
        check_inputs: bool,
    ):
        self.step, self.machine = step, machine
        self.ranges = ranges_of(step) if check_inputs else ()
        self.checks = checks_of(step)
        self.prediction = Prediction(step, machine, check_inputs)
        self.loss = Loss(step, place)

    def tensors(
        self, values: Mapping[str, object], types: Mapping
    ) -> tuple[list[tvm.runtime.Tensor], dict[str, int]]:
        """Return inputs and targets as tensors of these types, and their symbolic extents."""
        symbols: dict[str, int] = {}
        tensors = {name: as_input(name, values[name], ty, symbols) for name, ty in types.items()}
        check_ranges(self.ranges, tensors, symbols)
        return list(tensors.values()), symbols


#: The steps of other sizes after which a trainer warns that their step is not the fastest one.
_MANY_STEPS = 100


class Variants:
    """The compiled step of a trainer for the size of the examples, and after the first batch of
    another size that for all others.

    Parameters
    ----------
    step, machine, place, check_inputs
        As for :class:`Variant`.
    """

    def __init__(
        self,
        step: TrainStep,
        machine: Mapping,
        place: Place,
        check_inputs: bool,
    ):
        self._rest = place, check_inputs
        self.main = Variant(step, machine, *self._rest)
        self._others = step._other_rows
        self._other: Variant | None = None
        self._prediction: Prediction | None = None
        #: The numbers of steps of other sizes, and of the examples' size.
        self._counts = [0, 0]

    def of_batch(
        self, types: Mapping[str, relax.TensorType], values: Mapping[str, object]
    ) -> Variant:
        """Return the compiled step for the number of rows of a batch."""
        if self._others is None or not self._others.are_in(types, values, is_step=True):
            return self.main
        if self._other is None:
            with shown("compiling the step for other numbers of rows"):
                step, (place, _) = self._others.step(), self._rest
                machine = place.machine(place.step(step))
                self._other = Variant(step, machine, *self._rest)
        return self._other

    def prediction_of(self, inputs: Sequence[object]) -> Prediction:
        """Return the compiled function for the number of rows of inputs; without a step for it,
        nothing but this function is compiled."""
        types = self.main.prediction.types_of(inputs)
        values = dict(zip(types, inputs, strict=True))
        if self._others is None or not self._others.are_in(types, values):
            return self.main.prediction
        if self._other is not None:
            return self._other.prediction
        if self._prediction is None:
            with shown("compiling the prediction for other numbers of rows"):
                self._prediction = Prediction.alone(self._others.step(), *self._rest)
        return self._prediction

    def note(self, variant: Variant) -> None:
        """Count a step, and warn if many were of other sizes and none of the examples' size."""
        counts = self._counts
        counts[variant is self.main] += 1
        if counts == [_MANY_STEPS, 0] and self._others is not None:
            warnings.warn(
                "the batches differ from the examples of the import, which have "
                f"{self._others.rows} rows: import the model with an example of the batches' size "
                "for the fastest step",
                stacklevel=6,
            )
