"""The numbers of rows that an import takes: its example's, or any number."""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import tvm
from tvm import relax

from .._progress import shown

#: The number of rows in the guards of torch.export.
_SIZE = re.compile(r"L\['(?:args|kwargs)'\](?:\[[^]]*\])+\.size\(\)\[0\]")

#: Held by the second import, which replaces functions of PyTorch meanwhile.
_lock = threading.RLock()

#: The symbol of the number of rows.
BATCH = "batch"


class Changed(Exception):
    """A model that is another one than at the first import."""


class Batch:
    """The number of rows for which a model was imported, and its import for any number of rows,
    which is made at its first use.

    Parameters
    ----------
    rows : int or None
        The number of rows; None if the inputs have no common number.
    imported : Imported
        The import for this number.
    again : Callable or None
        Imports the model with a symbolic number of rows.
    how : str
        The call that imports the model for ``{rows}`` rows, for errors.
    reason : str
        The reason for which the number is fixed, if there is no second import.
    """

    def __init__(
        self,
        rows: int | None,
        imported: Any,
        again: Callable[[], Any] | None,
        how: str,
        reason: str = "",
    ):
        types = {**imported.inputs, **getattr(imported, "targets", {})}
        self.rows, self.how, self.reason = rows, how, reason
        #: The inputs and targets whose first axis has the rows.
        self.names = tuple(name for name, ty in types.items() if first_extent(ty) == rows)
        self._again, self._first, self._imported = again, _described(imported), None

    def imported(self) -> Any:
        """Return the import for any number of rows; None if the number is fixed, for ``reason``."""
        with _lock:
            if self._again is not None:
                with shown("importing the model for any number of rows"), warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # the first import has given them
                    self._import(self._again)
                self._again = None  # the model is released
        return self._imported

    def _import(self, again: Callable[[], Any]) -> None:
        try:
            imported = again()
        except Changed as error:
            self.reason = str(error)
            return
        except Exception as error:  # torch.export and TVM's importer raise every kind
            self.reason = f"the model fixes it: {_brief(error, self.rows)}"
            return
        if _described(imported) != self._first:
            self.reason = "the model has changed since the import"
            return
        self._imported = imported

    def __str__(self) -> str:
        names = " and ".join(self.names)
        if self.rows is None:
            return self.reason
        if self.imported() is not None:
            return f"any number of rows of {names}; the fastest step has {self.rows} rows"
        return f"{self.rows} rows of {names}; {self.reason}"


def first_extent(ty: relax.TensorType) -> int | None:
    """Return the extent of the first axis of a tensor; None without axes, or for a symbol."""
    extents = [] if ty.shape is None else list(ty.shape.values)
    return int(extents[0]) if extents and hasattr(extents[0], "value") else None


def _brief(error: Exception, rows: int | None) -> str:
    """Return the reason of an error in one line."""
    text = " ".join(str(error).split())
    if "specialized it to be a constant" in text:
        return (
            f"its code has the number itself, as reshape({rows}, -1) and len(x) have; "
            "x.shape[0] is symbolic"
        )
    guard = re.search(r"the generated guard (.*?)\.? (?:- |Suggested|A write)", text)
    if guard:
        return f"its code needs {re.sub(_SIZE, BATCH, guard[1])}"
    return text[:300] or type(error).__name__


def _described(imported: Any) -> dict[str, list[str]]:
    """Return the names of an import's tensors, with the types of the values."""
    values = {**imported.params, **imported.frozen, **imported.states}
    types = [f"{name}: {_type_of(tensor)}" for name, tensor in values.items()]
    targets: Mapping = getattr(imported, "targets", {})
    groups = imported.inputs, targets, imported.outputs, imported.params, imported.states
    return {"values": types, **{str(i): list(group) for i, group in enumerate(groups)}}


def _type_of(tensor: tvm.runtime.Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"
