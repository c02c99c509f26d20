"""Symbolic extents that the user asks for, in the form that torch.export takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import NoneType

import torch
from torch.export import Dim


class DynamicShapes:
    """The symbolic extents of the inputs and targets.

    Parameters
    ----------
    given : Mapping or Sequence or None
        As for :func:`relax_grad.frontend.torch.from_module`.
    arguments : Sequence[str]
        The names of the positional arguments of the module, without those of ``*args``.
    variadic : str or None
        The name of ``*args``, whose elements the other positional arguments are.
    keywords : Sequence[str]
        The names of the keyword arguments.
    targets : Sequence[str]
        The names of the targets.
    """

    def __init__(self, given, arguments, variadic, keywords, targets):
        self._named: list[str | None] = []  # for each tensor and axis, in order
        self._dims: dict[str, object] = {}
        if given is None:
            self._given = None
            return
        if isinstance(given, Mapping):
            known = {*arguments, *keywords, *targets, *([variadic] if variadic else [])}
            for name in given:
                if name not in known:
                    raise ValueError(
                        f"dynamic_shapes: there is no input {name!r}; the inputs are "
                        f"{', '.join([*arguments, *keywords, *targets])}"
                    )
            rest = given.get(variadic, ()) if variadic else ()
            self._given = (
                [*(given.get(name) for name in arguments), *rest],
                {name: given.get(name) for name in keywords},
                [given.get(name) for name in targets],
            )
        elif isinstance(given, Sequence) and not isinstance(given, str):
            count = len(arguments)
            self._given = (list(given[:count]), {}, list(given[count:]))
        else:
            raise TypeError(
                f"dynamic_shapes must be a mapping of names to shapes, or a sequence, but it is {given!r}"
            )

    def of(self, values: tuple):
        """Return the specification for the arguments ``(args, kwargs, targets)``."""
        if self._given is None:
            return None
        self._named = []
        args, kwargs, targets = self._given
        # The evaluation has no targets.
        given = (args, kwargs, targets if values[2] else [])
        return tuple(map(self._spec, values, given))

    def _spec(self, value, given):
        if isinstance(value, torch.Tensor):
            if not isinstance(given, (tuple, list, Mapping, NoneType)):
                raise TypeError(
                    "dynamic_shapes: the axes of a tensor must be a mapping of axes to extents, or a sequence of extents, "
                    f"but they are {given!r}"
                )
            items = list(enumerate(given)) if isinstance(given, (tuple, list)) else given
            found = {axis: self._dim(dim) for axis, dim in dict(items or {}).items()}
            for axis in found:
                if not isinstance(axis, int) or not 0 <= axis < value.ndim:
                    raise ValueError(
                        f"dynamic_shapes: a tensor has {value.ndim} axes, and {axis!r} is none of them"
                    )
            self._named.append(
                {axis: getattr(dim, "__name__", None) for axis, dim in found.items()}
            )
            return found or None
        if isinstance(value, Mapping):
            given = given or {}
            return {key: self._spec(each, given.get(key)) for key, each in value.items()}
        if isinstance(value, (tuple, list)):
            given = list(given or [])
            if len(given) > len(value):
                raise ValueError(
                    f"dynamic_shapes: there are {len(given)} entries for {len(value)} values"
                )
            given += [None] * (len(value) - len(given))
            return type(value)(self._spec(*each) for each in zip(value, given, strict=True))
        return None

    def _dim(self, dim):
        """Return a dimension; equal names are one dimension."""
        if isinstance(dim, str) and not dim.isidentifier():
            raise ValueError(
                f"dynamic_shapes: the name of an extent must be an identifier, but it is {dim!r}"
            )
        return self._dims.setdefault(dim, Dim(dim)) if isinstance(dim, str) else dim

    def names(
        self, exported: torch.export.ExportedProgram, places: Sequence[str]
    ) -> dict[str, str]:
        """Return the user's names of the symbols of a graph, whose inputs are at these placeholders."""
        nodes = {node.name: node for node in exported.graph.find_nodes(op="placeholder")}
        found = {}
        for place, named in zip(places, self._named, strict=False):
            shape = nodes[place].meta["val"].shape
            for axis, name in named.items():
                if name and isinstance(shape[axis], torch.SymInt):
                    found[str(shape[axis].node.expr)] = name
        return found
