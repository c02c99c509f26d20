"""The loss of a step without an update."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import tvm

from .._progress import shown
from ..ir.module import with_functions, with_only
from ._device import Place
from ._functions import StepFunctions


class Loss:
    """The function of a step's loss, which is compiled at its first call."""

    def __init__(self, step: StepFunctions, place: Place):
        self._source, self._place = step._recipe.source, place
        self._compiled: Callable | None = None

    def __call__(
        self,
        model: Mapping[str, tvm.runtime.Tensor],
        batch: Mapping[str, tvm.runtime.Tensor],
        seed: np.ndarray,
    ) -> float:
        """Return the loss of a batch with values of the model."""
        source = self._source
        name = source.evaluation or source.name
        function = source.module[name]
        if self._compiled is None:
            module = with_functions(source.module, {name: function})
            module = with_only(module, [name])
            with shown("compiling the evaluation"):
                executable = self._place.module(module)
            self._compiled = self._place.machine(executable)[name]
        drawn = tvm.runtime.tensor(seed)
        if source.evaluation:
            values = {**model, **batch}
            loss = self._compiled(*(values.get(param.name, drawn) for param in function.params))
            return float(loss.numpy().reshape(()))
        result = self._compiled(*source.signature.arguments(batch, model, drawn))
        for i in source.loss:
            result = result[i]
        return float(result.numpy().reshape(()))
