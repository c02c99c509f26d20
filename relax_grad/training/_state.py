"""The state of training in a file."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax

from ..ir.compat import dtype_of
from . import _files
from ._tensors import shape_of
from .history import COUNTERS, History


def read_state(path, step) -> tuple[dict[str, list], dict[str, int], History, dict]:
    """Return the groups of tensors, the counters, the history and further values of a file of a ``TrainStep``.

    Raises
    ------
    ValueError
        If the file is damaged or belongs to another step.
    """
    found, described = _files.read(path)
    counters, history, more = _described(path, described)
    unknown = [name for name in found if name.partition("/")[0] not in _files.GROUPS]
    if unknown:
        raise ValueError(
            f"{path} has an unknown {unknown[0]}; it was written by a trainer of another step"
        )
    groups = {}
    for group in _files.GROUPS:
        types = getattr(step, group)
        names = {key.partition("/")[2] for key in found if key.startswith(f"{group}/")}
        for kind, some in (
            ("lacks", set(types) - names),
            ("has an unknown", names - set(types)),
        ):
            if some:
                raise ValueError(
                    f"{path} {kind} {group}/{min(some)}; it was written by a trainer of another step"
                )
        groups[group] = [
            _loaded(path, f"{group}/{name}", found[f"{group}/{name}"], kind)
            for name, kind in types.items()
        ]
    return groups, counters, history, more


def _described(path, described: dict) -> tuple[dict[str, int], History, dict]:
    """Return the counters, the history and further values of a file."""
    parts = [described.get(name) for name in ("counters", "history", "more")]
    if not all(isinstance(each, dict) for each in parts):
        raise ValueError(f"{path} has no state of training; Trainer.save writes such files")
    counters, history, more = parts
    for name in COUNTERS:
        value = counters.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{path} is damaged: its counter {name} is {value!r}")
    try:
        return counters, History(**history), more
    except TypeError as error:
        raise ValueError(f"{path} is damaged: its history is of another form: {error}") from error


def _loaded(path, key: str, array: np.ndarray, kind: relax.TensorType) -> tvm.runtime.Tensor:
    shape = shape_of(kind)
    if array.shape != shape or str(array.dtype) != dtype_of(kind):
        raise ValueError(
            f"{path}: {key} has shape {array.shape} and dtype {array.dtype}, but the step needs {shape} and {dtype_of(kind)}"
        )
    return tvm.runtime.tensor(array)
