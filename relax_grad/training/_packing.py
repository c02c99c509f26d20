"""The history of training as text: columns of numbers in few bytes for each step."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import fields

import numpy as np

from .history import History, thin

#: The columns of integers, which mostly grow by the same step.
_INTEGERS = ("step", "epoch")

#: The bits of the mantissa of float32 that times do not keep: 12 bits, more than three digits,
#: stay.
_FORGOTTEN = 11

#: The most numbers of a column in a file, which a damaged file could exceed.
_MOST = 1 << 28


def packed(history: History) -> dict:
    """Return a history for JSON, of about 12 bytes for each step.

    Integers and learning rates are written as differences of differences, losses and metrics as
    float32 if this keeps all their bits, and times with three digits. Bytes of equal weight stand
    side by side, and zlib compresses them.
    """
    thin(history)
    columns = {}
    for name in ("step", "epoch", "loss", "lr", "seconds"):
        columns[name] = _column(name, getattr(history, name))
    metrics = {name: _column(name, values) for name, values in history.metrics.items()}
    return {"columns": columns, "metrics": metrics, "evaluations": history.evaluations}


def unpacked(described: Mapping) -> dict:
    """Return the lists of a history of a file: of :func:`packed`, or of an earlier version, which
    wrote the lists themselves.

    Raises
    ------
    ValueError
        If a column is damaged.
    """
    if "columns" not in described:
        return dict(described)
    if set(described) != {"columns", "metrics", "evaluations"}:
        raise ValueError(f"it has {', '.join(described)}")
    names = {column.name for column in fields(History)} - {"metrics", "evaluations"}
    columns, metrics, evaluations = (described[k] for k in ("columns", "metrics", "evaluations"))
    if not isinstance(columns, dict) or set(columns) != names:
        raise ValueError(f"its columns are not {', '.join(sorted(names))}")
    if not isinstance(metrics, dict) or not isinstance(evaluations, list):
        raise ValueError("metrics must be an object, and evaluations a list")
    lists: dict = {name: _numbers(name, column) for name, column in columns.items()}
    lists["metrics"] = {name: _numbers(name, column) for name, column in metrics.items()}
    return {**lists, "evaluations": evaluations}


def _column(name: str, values: Sequence[float]) -> list:
    """Return the kind of the numbers, their count, and their bytes as text."""
    if name in _INTEGERS:
        return _text("int64", np.array(values, "int64"))
    array = np.array(values, "float64")
    if name == "seconds":
        bits = array.astype("float32").view("uint32")
        return _text("float32", bits >> _FORGOTTEN << _FORGOTTEN)
    if name == "lr":
        return _text("lr", array.view("int64"))
    with np.errstate(over="ignore"):
        short = array.astype("float32")
    if np.array_equal(short.astype("float64").view("uint64"), array.view("uint64")):
        return _text("float32", short.view("uint32"))
    return _text("float64", array.view("uint64"))


def _text(kind: str, bits: np.ndarray) -> list:
    if kind in ("int64", "lr"):
        bits = np.diff(bits, 2, prepend=np.zeros(2, "int64"))
    planes = bits.view("uint8").reshape(-1, bits.itemsize).T
    data = zlib.compress(np.ascontiguousarray(planes).tobytes(), 6)
    return [kind, len(bits), base64.b64encode(data).decode()]


def _numbers(name: str, column: object) -> list:
    """Return the numbers of a column."""
    if not isinstance(column, list) or len(column) != 3 or not isinstance(column[2], str):
        raise ValueError(f"{name} is no column")
    kind, count, text = column
    kinds = ("int64",) if name in _INTEGERS else ("float32", "float64", "lr")
    if kind not in kinds or not isinstance(count, int) or not 0 <= count <= _MOST:
        raise ValueError(f"{name} is no column of {' or '.join(kinds)}, but of {kind!r}")
    width = 4 if kind == "float32" else 8
    reader = zlib.decompressobj()
    try:
        data = reader.decompress(base64.b64decode(text, validate=True), count * width + 1)
    except zlib.error as error:
        raise ValueError(f"{name} cannot be decompressed: {error}") from error
    if len(data) != count * width:
        raise ValueError(f"{name} has not {count} numbers")
    if not count:
        return []
    planes = np.frombuffer(data, "uint8").reshape(width, count)
    bits = np.ascontiguousarray(planes.T).view(f"uint{8 * width}").reshape(count)
    if kind in ("int64", "lr"):
        bits = np.cumsum(np.cumsum(bits.view("int64")))
    if kind == "int64":
        return bits.tolist()
    return bits.view("float32" if width == 4 else "float64").astype("float64").tolist()
