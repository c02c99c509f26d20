"""Means of the loss and of metrics over the batches of a loader."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import tvm

from .._validation import check_call, described
from ._inputs import NO_BATCH, check_loader, input_types, result_of
from ._steps import InSteps


def means(
    trainer: InSteps,
    loader: Iterable,
    metrics: Mapping[str, Callable[..., float]] | None,
    ema: bool,
) -> dict[str, float]:
    """Return the means; the arguments are as for :meth:`Trainer.evaluate`."""
    step = trainer.train_step
    metrics = {} if metrics is None else metrics
    if not isinstance(metrics, Mapping) or not all(map(callable, metrics.values())):
        raise TypeError(
            "metrics must be functions by their names, such as "
            '{"accuracy": lambda output, target: np.mean(output.argmax(1) == target)}, but it '
            f"is {described(metrics)}"
        )
    has_loss = "loss" not in metrics and not step._recipe.source.has_modes
    if not has_loss and not metrics:
        raise ValueError(
            "metrics must be given: the loss of a PyTorch import is a function in training "
            "mode. For example "
            '{"error": lambda output, target: np.mean((output - target) ** 2)}'
        )
    check_loader(loader, step.batch)
    totals = dict.fromkeys([*(["loss"] if has_loss else []), *metrics], 0.0)
    count = 0
    for batch in loader:
        named = isinstance(batch, Mapping)
        values = () if named else batch if isinstance(batch, list | tuple) else (batch,)
        variant, taken = trainer._batch(values, batch if named else {})
        tensors = dict(zip(step.batch, taken, strict=True))
        shape: Sequence[int] = next(iter(tensors.values())).shape if tensors else ()
        weight = int(shape[0]) if len(shape) else 1
        results = {}
        if has_loss:
            results["loss"] = variant.loss(trainer._values_of(ema), tensors, trainer._seed())
        if metrics:
            results |= _metrics_of(trainer, tensors, metrics, ema)
        for name, value in results.items():
            totals[name] += value * weight
        count += weight
    if not count:
        raise ValueError(f"the loader gave no example; {NO_BATCH}")
    return {name: total / count for name, total in totals.items()}


def _metrics_of(
    trainer: InSteps,
    tensors: Mapping[str, tvm.runtime.Tensor],
    metrics: Mapping[str, Callable[..., float]],
    ema: bool,
) -> dict[str, float]:
    names = input_types(trainer.train_step)
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
