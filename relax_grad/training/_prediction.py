"""Predictions of the model of a ``Trainer``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import tvm
from tvm import relax

from ..ir.index_ranges import IndexRange
from ..ir.module import with_only
from ._allocator import Allocator
from ._device import Place
from ._functions import StepFunctions
from ._inputs import as_input, check_ranges, forward_checks_of, forward_ranges_of, input_types
from ._slots import EMA, Slot
from ._tensors import Tensors, leaves_of


class Prediction:
    """The function of a step's module that computes the model's outputs in evaluation mode."""

    def __init__(self, step: StepFunctions, machine: Mapping, check_inputs: bool):
        self._step, self._machine = step, machine
        self._checks = forward_checks_of(step)
        self._ranges: Sequence[IndexRange] = forward_ranges_of(step) if check_inputs else ()

    @classmethod
    def alone(cls, step: StepFunctions, place: Place, check_inputs: bool) -> Prediction:
        """Compile the function without those that train."""
        assert step.forward is not None
        module = with_only(step.module, [step.forward.name])
        return cls(step, place.machine(place.module(module)), check_inputs)

    def types_of(self, inputs: Sequence[object]) -> dict[str, relax.TensorType]:
        """Return the types of these inputs by their names; a seed may be left out."""
        if self._step.forward is None:
            raise ValueError(
                "the model has no function for prediction; imports of PyTorch and ONNX models "
                "have one"
            )
        types = input_types(self._step)
        if len(inputs) == len(types) - 1:
            types.pop("seed", None)
        if len(inputs) != len(types):
            raise TypeError(
                f"the model takes {', '.join(types)}, without targets, but {len(inputs)} tensors "
                "were given"
            )
        return types

    def outputs(
        self, inputs: Sequence[object], values: Tensors, seed: np.ndarray, allocator: Allocator
    ) -> tvm.runtime.Tensor | list[tvm.runtime.Tensor]:
        """Return the outputs of a model with these values; ``seed`` is for a function that takes
        one which the inputs lack."""
        types = self.types_of(inputs)
        forward = self._step.forward
        assert forward is not None
        if len(inputs) < len(input_types(self._step)):
            types, inputs = input_types(self._step), (seed, *inputs)
        symbols: dict[str, int] = {}
        tensors = {
            name: as_input(name, value, ty, symbols)
            for (name, ty), value in zip(types.items(), inputs, strict=True)
        }
        check_ranges(self._ranges, tensors, symbols)
        for check in self._checks:
            check.check(symbols)
        allocator.begin(symbols)
        result = self._machine[forward.name](
            *tensors.values(), *(values[name] for name in forward.values)
        )
        if isinstance(result, tvm.runtime.Tensor):
            return result
        outputs = leaves_of(result)
        return outputs[0] if len(outputs) == 1 else outputs


def averages_of(params: Tensors, slots: Tensors) -> Tensors:
    """Return the moving averages of parameters, in their dtypes.

    Raises
    ------
    ValueError
        If the optimizer's state has none.
    """
    if not any(Slot.parse(name).kind == EMA for name in slots):
        raise ValueError("the step has no moving average; make it with train_step(..., ema=0.999)")
    return {
        name: tvm.runtime.tensor(slots[str(Slot(EMA, name))].numpy().astype(param.numpy().dtype))
        for name, param in params.items()
    }
