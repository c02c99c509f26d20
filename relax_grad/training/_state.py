"""The state of training in a file."""

from __future__ import annotations

import dataclasses
import os

import numpy as np
import tvm
from tvm import relax

from .._validation import check_integer
from ..ir.compat import dtype_of
from ..ir.signature import GROUPS
from . import _files
from ._functions import StepFunctions
from ._packing import unpacked
from ._tensors import shape_of
from ._values import restored
from .history import COUNTERS, MOST_COUNT, MOST_SEED, History


def check_seed(seed: object) -> int:
    """Return the seed of a trainer as an integer of Python, or raise an error if an argument is
    none."""
    return check_integer("seed", seed, 0, MOST_SEED)


def read_state(
    path: str | os.PathLike, step: StepFunctions
) -> tuple[dict[str, list], dict[str, int], History, dict]:
    """Return the groups of tensors, the counters, the history and further values of a file of a
    ``TrainStep``.

    Raises
    ------
    ValueError
        If the file is damaged or belongs to another step.
    """
    arrays, described = _files.read(path)
    counters, history, more = _described(path, described)
    unknown = [key for key in arrays if key.partition("/")[0] not in GROUPS]
    if unknown:
        raise ValueError(
            f"{path} has an unknown {unknown[0]}; it was written by a trainer of another step"
        )
    groups = {}
    for group in GROUPS:
        types = getattr(step, group)
        names = {key.partition("/")[2] for key in arrays if key.startswith(f"{group}/")}
        for fault, some in (
            ("lacks", set(types) - names),
            ("has an unknown", names - set(types)),
        ):
            if some:
                raise ValueError(
                    f"{path} {fault} {group}/{min(some)}; it was written by a trainer of another "
                    "step"
                )
        groups[group] = [
            _loaded(path, f"{group}/{name}", arrays[f"{group}/{name}"], ty)
            for name, ty in types.items()
        ]
    return groups, counters, history, more


def _described(path: str | os.PathLike, described: dict) -> tuple[dict[str, int], History, dict]:
    """Return the counters, the history and further values of a file."""
    counters, columns, more = (described.get(name) for name in ("counters", "history", "more"))
    if not (isinstance(counters, dict) and isinstance(columns, dict) and isinstance(more, dict)):
        raise ValueError(f"{path} has no state of training; Trainer.save writes such files")
    for name in COUNTERS:
        value = counters.get(name)
        most = MOST_SEED if name == "seed" else MOST_COUNT
        if type(value) is not int or not 0 <= value <= most:
            raise ValueError(
                f"{path} is damaged: its counter {name} must be from 0 to {most}, but it is "
                f"{value!r}"
            )
    if counters["skipped"] > counters["steps"]:
        raise ValueError(
            f"{path} is damaged: {counters['skipped']} of {counters['steps']} steps were skipped"
        )
    fault: str | ValueError | None
    try:
        history = unpacked(columns)
        fault = _fault_of(history)
    except ValueError as error:
        fault = error
    if fault:
        raise ValueError(f"{path} is damaged: its history is of another form: {fault}")
    try:
        return counters, History(**history), restored(more)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def _fault_of(history: dict) -> str | None:
    """Return why an object is no history; None if it is one."""
    fields = [member.name for member in dataclasses.fields(History)]
    names = set(fields).symmetric_difference(history)
    if names:
        return f"{min(names)} is {'unknown' if min(names) in history else 'missing'}"
    metrics, evaluations = history["metrics"], history["evaluations"]
    if not isinstance(metrics, dict):
        return f"metrics is {metrics!r}"
    columns = {name: history[name] for name in fields if name not in ("metrics", "evaluations")}
    for name, column in {**columns, **metrics}.items():
        kinds = {int} if name in ("step", "epoch") else {int, float}
        if not isinstance(column, list) or not kinds.issuperset(map(type, column)):
            return f"{name} is no list of {'numbers' if float in kinds else 'integers'}"
        count, steps = len(column), len(columns["step"])
        # Metrics of a step that was made anew begin later.
        if count > steps or (count < steps and name in columns):
            return f"{name} has {count} values for {steps} steps"
    for name in ("step", "epoch", "seconds"):
        if not all(value >= 0 for value in columns[name]):
            return f"{name} has numbers that are negative or NaN"
    if not isinstance(evaluations, list) or not all(map(_is_evaluation, evaluations)):
        return "evaluations is no list of numbers by their names"
    return None


def _is_evaluation(value: object) -> bool:
    return isinstance(value, dict) and all(
        type(number) in (int, float) for number in value.values()
    )


def _loaded(
    path: str | os.PathLike, key: str, array: np.ndarray, ty: relax.TensorType
) -> tvm.runtime.Tensor:
    shape = shape_of(ty)
    if array.shape != shape or str(array.dtype) != dtype_of(ty):
        raise ValueError(
            f"{path}: {key} has shape {array.shape} and dtype {array.dtype}, but the step needs "
            f"{shape} and {dtype_of(ty)}"
        )
    return tvm.runtime.tensor(array)
