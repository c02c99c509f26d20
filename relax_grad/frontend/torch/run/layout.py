"""The places of the tensors of a module."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from .._build import values_of
from ..tracing.hooks import hooks_of


class Layout:
    """The places of the tensors of a module by their keys."""

    def __init__(self, module: nn.Module):
        self._modules = list(module.modules())
        self._children = [
            (submodule._modules, tuple(submodule._modules.values()))
            for submodule in self._modules
            if submodule._modules
        ]
        _, aliases = values_of({"": module})
        self._places = {}
        self._read: dict[tuple[bool, ...], list] = {}
        for prefix, submodule in module.named_modules(remove_duplicate=False):
            for tensors in (submodule._parameters, submodule._buffers):
                for name in tensors:
                    self._places[f"{prefix}.{name}" if prefix else name] = tensors, name
        self._hooks = hooks_of(self._modules)
        self._first_hooks = self._hooks()
        self._ties = [(*self._places[key], *self._places[first]) for key, first in aliases.items()]

    def is_current(self) -> bool:
        """Tell whether the module has the submodules, the hooks and the tied tensors that it
        had."""
        if self._hooks() != self._first_hooks:
            return False
        for children, first_children in self._children:
            if tuple(children.values()) != first_children:
                return False
        return all(
            tensors.get(name) is first_tensors.get(first_name)
            for tensors, name, first_tensors, first_name in self._ties
        )

    def flags(self) -> tuple[bool, ...]:
        """Return the modes of all submodules."""
        return tuple([module.training for module in self._modules])

    def tensors(self, flags: tuple[bool, ...], keys: Sequence[str]) -> list[torch.Tensor]:
        """Return the tensors of some keys, which depend on the modes only."""
        places = self._read.get(flags)
        if places is None:
            places = self._read[flags] = [self._places[key] for key in keys]
        return [tensors[name] for tensors, name in places]
