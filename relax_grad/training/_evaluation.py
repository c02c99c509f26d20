"""Means of the loss and of metrics over the batches of a loader."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tvm

from .._progress import shown
from .._validation import check_call, described
from ..ir.module import with_functions, with_only
from ._device import Place
from ._inputs import NO_BATCH, check_loader, input_types, result_of


class Evaluation:
    """The functions that a ``Trainer`` evaluates. That of the loss is compiled at its first use."""

    def __init__(self, step: Any, place: Place):
        self._step, self._place = step, place
        self._loss: Callable | None = None

    def means(
        self,
        trainer: Any,
        loader: Iterable,
        metrics: Mapping[str, Callable[..., float]] | None,
        ema: bool,
    ) -> dict[str, float]:
        """Return the means; the arguments are as for :meth:`Trainer.evaluate`."""
        metrics = {} if metrics is None else metrics
        if not isinstance(metrics, Mapping) or not all(map(callable, metrics.values())):
            raise TypeError(
                "metrics must be functions by their names, such as "
                '{"accuracy": lambda output, target: np.mean(output.argmax(1) == target)}, but it '
                f"is {described(metrics)}"
            )
        has_loss = "loss" not in metrics and not self._step._recipe.source.has_modes
        if not has_loss and not metrics:
            raise ValueError(
                "metrics must be given: the loss of a PyTorch import is a function in training "
                "mode. For example "
                '{"error": lambda output, target: np.mean((output - target) ** 2)}'
            )
        check_loader(loader, self._step.batch)
        totals = dict.fromkeys([*(["loss"] if has_loss else []), *metrics], 0.0)
        count = 0
        for batch in loader:
            named = isinstance(batch, Mapping)
            values = () if named else batch if isinstance(batch, list | tuple) else (batch,)
            variant, taken = trainer._batch(values, batch if named else {})
            tensors = dict(zip(self._step.batch, taken, strict=True))
            shape: Sequence[int] = next(iter(tensors.values())).shape if tensors else ()
            weight = int(shape[0]) if len(shape) else 1
            loss_of = variant.evaluation._loss_of
            results = {"loss": loss_of(trainer, tensors, ema)} if has_loss else {}
            if metrics:
                results |= self._metrics_of(trainer, tensors, metrics, ema)
            for name, value in results.items():
                totals[name] += value * weight
            count += weight
        if not count:
            raise ValueError(f"the loader gave no example; {NO_BATCH}")
        return {name: total / count for name, total in totals.items()}

    def _loss_of(self, trainer: Any, tensors: Mapping[str, tvm.runtime.Tensor], ema: bool) -> float:
        source = self._step._recipe.source
        name = source.evaluation or source.name
        function = source.module[name]
        if self._loss is None:
            module = with_functions(source.module, {name: function})
            module = with_only(module, [name])
            with shown("compiling the evaluation"):
                executable = self._place.module(module)
            self._loss = self._place.machine(executable)[name]
        model, seed = trainer._values_of(ema), tvm.runtime.tensor(trainer._seed())
        if source.evaluation:
            values = {**model, **tensors}
            loss = self._loss(*(values.get(param.name, seed) for param in function.params))
            return float(loss.numpy().reshape(()))
        result = self._loss(*source.signature.arguments(tensors, model, seed))
        for i in source.loss:
            result = result[i]
        return float(result.numpy().reshape(()))

    def _metrics_of(
        self,
        trainer: Any,
        tensors: Mapping[str, tvm.runtime.Tensor],
        metrics: Mapping[str, Callable[..., float]],
        ema: bool,
    ) -> dict[str, float]:
        names = input_types(self._step)
        inputs = [tensors[name] for name in names if name in tensors]
        outputs = trainer.predict(*inputs, ema=ema)
        outputs = outputs if isinstance(outputs, list) else [outputs]
        targets = [tensor for name, tensor in tensors.items() if name not in names]
        arrays = [tensor.numpy() for tensor in (*outputs, *targets)]
        results = {}
        for name, metric in metrics.items():
            start = f"metrics: {name} must return a number, as np.mean(...) does, but it returns"
            check_call(f"metrics: {name}", metric, arrays, "lambda output, target: ...")
            try:
                value = metric(*arrays)
            except AttributeError as error:
                if not isinstance(error.obj, np.ndarray | np.generic):
                    raise
                raise TypeError(
                    f"metrics: {name} gets arrays of NumPy, but reads an attribute of a tensor: "
                    f"{error}; write np.mean(...), or torch.from_numpy(output)"
                ) from error
            results[name] = result_of(start, value)
        return results
