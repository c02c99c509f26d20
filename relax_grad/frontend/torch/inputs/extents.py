"""Symbolic extents that the user asks for, in the form that torch.export takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch.export import Dim

from ..._batch import BATCH
from .names import Inputs


class Extents(NamedTuple):
    """The symbolic extents of some inputs.

    Attributes
    ----------
    specification : tuple or None
        They in the form that ``torch.export.export`` takes.
    names : list[dict[int, str | None]]
        For each tensor, in order, the names of extents by their axes.
    """

    specification: tuple | None
    names: list[dict[int, str | None]]

    def symbols(
        self, exported: torch.export.ExportedProgram, places: Sequence[str]
    ) -> dict[str, str]:
        """Return the user's names of the symbols of a graph, whose inputs are at these
        placeholders."""
        nodes = {node.name: node for node in exported.graph.find_nodes(op="placeholder")}
        symbols = {}
        for place, names in zip(places, self.names, strict=False):
            shape = nodes[place].meta["val"].shape
            for axis, name in names.items():
                if name and isinstance(shape[axis], torch.SymInt):
                    symbols[str(shape[axis].node.expr)] = name
        return symbols


def has_rows(value: object, rows: int) -> bool:
    """Tell whether a value is a tensor of so many rows."""
    return isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape[0] == rows


class DynamicShapes:
    """The symbolic extents of the inputs and targets.

    Parameters
    ----------
    dynamic_shapes : Mapping or Sequence or None
        As for :func:`relax_grad.frontend.torch.from_module`.
    inputs : Inputs
        The example arguments.
    """

    def __init__(self, dynamic_shapes: Mapping | Sequence | None, inputs: Inputs):
        self._dims: dict[str, Dim] = {}
        self._shapes: tuple | None = None
        arguments, variadic = inputs.positional, inputs.variadic
        places = [*arguments, *([variadic] if variadic else [])]
        if isinstance(dynamic_shapes, Sequence) and not isinstance(dynamic_shapes, str):
            every = [*places, *inputs.target_names]
            if len(dynamic_shapes) > len(every):
                raise ValueError(
                    f"dynamic_shapes: there are {len(dynamic_shapes)} entries for the inputs "
                    f"{', '.join(every)}"
                )
            dynamic_shapes = dict(zip(every, dynamic_shapes, strict=False))
        if isinstance(dynamic_shapes, Mapping):
            names = [*places, *inputs.kwargs, *inputs.target_names]
            for name in dynamic_shapes:
                if name not in names:
                    raise ValueError(
                        f"dynamic_shapes: there is no input {name!r}; the inputs are "
                        f"{', '.join(names)}"
                    )
            rest = (dynamic_shapes.get(variadic) or ()) if variadic else ()
            if not isinstance(rest, (tuple, list)):
                raise TypeError(
                    f"dynamic_shapes: the entry of *{variadic} must be a sequence with the shape "
                    f"of each argument, but it is {rest!r}"
                )
            self._shapes = (
                [*(dynamic_shapes.get(name) for name in arguments), *rest],
                {name: dynamic_shapes.get(name) for name in inputs.kwargs},
                [dynamic_shapes.get(name) for name in inputs.target_names],
            )
        elif dynamic_shapes is not None:
            raise TypeError(
                "dynamic_shapes must be a mapping of names to shapes, or a sequence, but it is "
                f"{dynamic_shapes!r}"
            )

    @classmethod
    def of_rows(cls, inputs: Inputs, rows: int) -> DynamicShapes:
        """Return a symbolic number of rows, for the first axes with this extent."""

        def nested(value: object) -> object:
            if isinstance(value, Mapping):
                return {key: nested(item) for key, item in value.items()}
            if isinstance(value, (tuple, list)):
                return [nested(item) for item in value]
            return {0: BATCH} if has_rows(value, rows) else None

        shapes = cls(None, inputs)
        args, targets = map(nested, inputs.args), map(nested, inputs.targets)
        shapes._shapes = list(args), nested(inputs.kwargs), list(targets)
        return shapes

    def of(self, inputs: Inputs) -> Extents:
        """Return the symbolic extents of all inputs, or of those without targets."""
        if self._shapes is None:
            return Extents(None, [])
        names: list[dict[int, str | None]] = []
        args, kwargs, targets = self._shapes
        pairs = (
            (inputs.args, args),
            (inputs.kwargs, kwargs),
            (inputs.targets, targets if inputs.targets else []),
        )
        specification = tuple(self._specification(value, shape, names) for value, shape in pairs)
        return Extents(specification, names)

    def _specification(
        self, value: object, shape: Any, names: list[dict[int, str | None]]
    ) -> object:
        """Return the specification of a value; the names of the extents of its tensors are added to
        ``names``."""
        if isinstance(value, torch.Tensor):
            dims = self._dims_of(value, shape)
            names.append({axis: getattr(dim, "__name__", None) for axis, dim in dims.items()})
            return dims or None
        if isinstance(value, Mapping):
            shape = shape or {}
            return {
                key: self._specification(item, shape.get(key), names) for key, item in value.items()
            }
        if isinstance(value, (tuple, list)):
            shapes = list(shape or [])
            if len(shapes) > len(value):
                raise ValueError(
                    f"dynamic_shapes: there are {len(shapes)} entries for {len(value)} values"
                )
            shapes += [None] * (len(value) - len(shapes))
            return type(value)(
                self._specification(item, shape, names)
                for item, shape in zip(value, shapes, strict=True)
            )
        return None

    def _dims_of(self, tensor: torch.Tensor, shape: object) -> dict[int, object]:
        """Return the dimensions of a tensor by their axes."""
        if not isinstance(shape, (tuple, list, Mapping, NoneType)):
            raise TypeError(
                "dynamic_shapes: the axes of a tensor must be a mapping of axes to extents, or "
                f"a sequence of extents, but they are {shape!r}"
            )
        items = list(enumerate(shape)) if isinstance(shape, (tuple, list)) else shape
        dims = {axis: self._dim(extent) for axis, extent in dict(items or {}).items()}
        for axis in dims:
            if not isinstance(axis, int) or not 0 <= axis < tensor.ndim:
                raise ValueError(
                    f"dynamic_shapes: a tensor has {tensor.ndim} axes, and {axis!r} is none of them"
                )
        return dims

    def _dim(self, extent: object) -> object:
        """Return a dimension; equal names are one dimension."""
        if not isinstance(extent, str):
            return extent
        if not extent.isidentifier():
            raise ValueError(
                f"dynamic_shapes: the name of an extent must be an identifier, but it is {extent!r}"
            )
        return self._dims.setdefault(extent, Dim(extent))
