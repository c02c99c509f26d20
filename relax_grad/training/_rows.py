"""Batches with another number of rows than the step was made for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

import numpy as np
from tvm import relax

from ..ir.compat import dtype_of
from ._inputs import as_input
from ._models import Batch, Import

#: The step, a ``TrainStep``, which this module does not import.
Step = TypeVar("Step")

#: Held while the step of other sizes is made.
_lock = threading.RLock()


class OtherRows(Generic[Step]):
    """The step for batches of other sizes, made at its first use.

    Parameters
    ----------
    batch : Batch
        The numbers of rows that the import takes.
    names : Sequence[str]
        The inputs and targets of the step whose first axis has the rows.
    make : Callable
        Makes the step of an import.
    """

    def __init__(self, batch: Batch, names: Sequence[str], make: Callable[[Import], Step]):
        assert batch.rows is not None
        self.rows, self._batch, self._names, self._make = batch.rows, batch, set(names), make
        #: The shapes of the examples.
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._step: Step | None = None
        self._reason = ""

    def are_in(
        self,
        types: Mapping[str, relax.TensorType],
        values: Mapping[str, object],
        is_step: bool = False,
    ) -> bool:
        """Tell whether inputs and targets, all of these types but for the number of rows, have
        another number.

        With ``is_step``, the tensors must have rows.

        Raises
        ------
        ValueError
            If the tensors differ in it, or there is no step for other numbers.
        TypeError
            If a value is no array.
        """
        # The common case, at each step.
        if all(
            name not in self._names or getattr(values[name], "shape", None) == self._shape(name, ty)
            for name, ty in types.items()
        ):
            return False
        counts: dict[str, int] = {}
        for name in self._names & set(types):
            shape, expected = _shape_of(values[name]), self._shape(name, types[name])
            if len(shape) != len(expected) or shape[1:] != expected[1:]:
                return False
            counts[name] = shape[0]
        _check_equal({name: counts[name] for name in types if name in counts})
        rows = next(iter(counts.values()), self.rows)
        if is_step and not rows:
            raise ValueError(
                f"the batch has no rows: {' and '.join(sorted(counts))}; leave it out, as "
                "DataLoader(..., drop_last=True) does"
            )
        if rows != self.rows and self._step is None:
            _check_dtypes(types, values, dict.fromkeys(counts, rows))
            if not self._has_step():
                raise ValueError(self._refusal(next(iter(counts)), rows))
        return rows != self.rows

    def _shape(self, name: str, ty: relax.TensorType) -> tuple[int, ...]:
        """Return the shape of an input or a target in the examples."""
        shape = self._shapes.get(name)
        if shape is None:
            shape = self._shapes[name] = _fixed(ty)
        return shape

    def _refusal(self, name: str, rows: int) -> str:
        return (
            f"{name} must have {self.rows} rows, but it has {rows}: {self._reason}. Give batches "
            f"of {self.rows} rows, as DataLoader(..., drop_last=True) does, or import the model "
            f"for {rows} rows: {self._batch.how.format(rows=rows)}"
        )

    def step(self) -> Step:
        """Return the step for other numbers of rows."""
        if not self._has_step() or self._step is None:
            raise ValueError(self._reason)
        return self._step

    def _has_step(self) -> bool:
        with _lock:
            return self._made()

    def _made(self) -> bool:
        if self._step is None and not self._reason:
            imported = self._batch.imported()
            if imported is None:
                self._reason = self._batch.reason
                return False
            try:
                self._step = self._make(imported)
            except Exception as error:  # of the user's loss, or of a rule
                self._reason = f"the step fixes it: {error}"
        return self._step is not None


def _check_dtypes(
    types: Mapping[str, relax.TensorType], values: Mapping[str, object], rows: Mapping[str, int]
) -> None:
    """Raise an error for a wrong dtype before anything is compiled."""
    for name, ty in types.items():
        extents = (rows[name], *_fixed(ty)[1:]) if name in rows else ty.shape
        as_input(name, values[name], relax.TensorType(extents, dtype_of(ty)), {})


def _check_equal(counts: Mapping[str, int]) -> None:
    if len(set(counts.values())) > 1:
        shown = ", ".join(f"{name} has {count}" for name, count in counts.items())
        raise ValueError(f"the tensors of a batch must have as many rows, but {shown}")


def other_rows(
    model: object,
    types: Mapping[str, relax.TensorType],
    targets: Mapping | None,
    make: Callable[[Import, Mapping | None], Step],
) -> OtherRows[Step] | None:
    """Return the step for batches of other sizes, if the model is an import of one size.

    Parameters
    ----------
    model : Imported or object
        The model of the step.
    types : Mapping[str, relax.TensorType]
        The inputs and targets of the step.
    targets : Mapping or None
        The targets of an ONNX import, with their types.
    make : Callable
        Makes the step of an import and of the types of its targets.
    """
    batch: Batch | None = getattr(model, "_batch", None)
    if batch is None or batch.rows is None:
        return None
    rows = batch.rows
    names = [*batch.names, *(name for name in targets or () if _fixed(types[name])[:1] == (rows,))]

    def of(imported: Import) -> Step:
        return make(imported, _with_symbol(targets, types, names, imported))

    return OtherRows(batch, names, of)


def _with_symbol(
    targets: Mapping | None,
    types: Mapping[str, relax.TensorType],
    names: Sequence[str],
    imported: Import,
) -> Mapping | None:
    """Return the types of the targets of an ONNX import with the symbol of its number of rows."""
    if targets is None:
        return None
    symbol = imported.inputs[names[0]].shape.values[0].name
    return {
        name: ((symbol, *_fixed(types[name])[1:]), dtype_of(types[name])) if name in names else kind
        for name, kind in targets.items()
    }


def _shape_of(value: object) -> tuple[int, ...]:
    shape = getattr(value, "shape", None)
    try:
        return tuple(map(int, np.shape(value) if shape is None else shape))
    except (TypeError, ValueError):  # such as lists of different lengths, which others refuse
        return ()


def _fixed(ty: relax.TensorType) -> tuple[int, ...]:
    return tuple(int(extent) if hasattr(extent, "value") else -1 for extent in ty.shape.values)
