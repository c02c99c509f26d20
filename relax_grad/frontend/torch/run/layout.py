"""The places of the tensors of a module."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from .._build import values_of
from ..tracing.hooks import hooks_of
from .guards import BoundGuards, Guards


class Traced(Protocol):
    """Compiled functions with the keys of their tensors and the attributes that their trace has
    read: a ``Program``."""

    guards: Guards
    keys: list[str]


class Layout:
    """The places of the tensors of a module by their keys."""

    def __init__(self, module: nn.Module):
        self.modules = list(module.modules())
        tables = [t for m in self.modules for t in (m._parameters, m._buffers)]
        self._tables = [(table, len(table)) for table in tables]
        self._absent = [(t, name) for t in tables for name, one in t.items() if one is None]
        self._guards: dict[object, BoundGuards] = {}
        self._children = [
            (submodule._modules, tuple(submodule._modules.values()))
            for submodule in self.modules
            if submodule._modules
        ]
        _, aliases = values_of({"": module})
        self._places = {}
        self._read: dict[object, list] = {}
        for prefix, submodule in module.named_modules(remove_duplicate=False):
            for tensors in (submodule._parameters, submodule._buffers):
                for name in tensors:
                    self._places[f"{prefix}.{name}" if prefix else name] = tensors, name
        self._hooks = hooks_of(self.modules)
        self._first_hooks = self._hooks()
        self._ties = [(*self._places[key], *self._places[first]) for key, first in aliases.items()]

    def is_current(self) -> bool:
        """Tell whether the module has the submodules, the hooks, the tied tensors and the names of
        tensors that it had."""
        if self._hooks() != self._first_hooks:
            return False
        for children, first_children in self._children:
            if tuple(children.values()) != first_children:
                return False
        for table, count in self._tables:
            if len(table) != count:
                return False
        for table, name in self._absent:
            if table.get(name) is not None:
                return False
        return all(
            tensors.get(name) is first_tensors.get(first_name)
            for tensors, name, first_tensors, first_name in self._ties
        )

    def flags(self) -> tuple[bool, ...]:
        """Return the modes of all submodules."""
        return tuple([module.training for module in self.modules])

    def guards(self, program: Traced) -> BoundGuards:
        """Return the guards of a ``Program`` for the modules of this layout."""
        bound = self._guards.get(program)
        if bound is None:
            bound = self._guards[program] = program.guards.of(self.modules)
        return bound

    def tensors(self, program: Traced) -> list[torch.Tensor]:
        """Return the tensors that a ``Program`` takes."""
        places = self._read.get(program)
        if places is None:
            places = self._read[program] = [self._places[key] for key in program.keys]
        return [tensors[name] for tensors, name in places]
