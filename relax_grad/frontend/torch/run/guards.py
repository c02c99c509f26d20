"""The attributes of modules that a trace has read, whose values are constants of compiled
functions."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from ..tracing.snapshots import ELEMENTS, OPAQUE, PLAIN, is_users, snapshot
from ..tracing.state import identity

#: It stands for an attribute that a module does not have.
_MISSING = object()

#: Values that always stand for the same constant.
_CONSTANT = (*PLAIN, *OPAQUE)

#: The dtypes that NumPy has.
_NUMPY = frozenset({torch.float32, torch.float64, torch.int32, torch.int64, torch.bool})


class Guards:
    """The values of attributes that a trace has read.

    Parameters
    ----------
    modules : Sequence[nn.Module]
        The module and its submodules in their order.
    reads : Collection[tuple[int, str]]
        The :func:`~..tracing.state.identity` of modules with the names of attributes that were
        read.
    """

    def __init__(self, modules: Sequence[nn.Module], reads: Collection[tuple[int, str]]):
        places = {identity(module): i for i, module in enumerate(modules)}
        self._plain: list[tuple[int, str, Any, object]] = []
        self._deep: list[tuple[int, str, object]] = []
        self._classes: dict[tuple[type, str], tuple[int, object]] = {}
        # Their identities are compared, which others could have later.
        self._kept: list[object] = []
        registered = _registered(modules)
        for owner, name in sorted(reads):
            if owner not in places or name.startswith("__") or name == "_compiled_call_impl":
                continue
            module = modules[places[owner]]
            tables = module._parameters, module._buffers, module._modules
            if any(name in table for table in tables):  # the layout of the module has these
                continue
            base = _base(type(module), name)
            default = _MISSING if base is None else vars(base)[name]
            if base is not None and is_users(base.__module__) and name not in vars(module):
                described = _described(default, registered, self._kept)
                self._classes.setdefault((base, name), (places[owner], described))
            default = default if isinstance(default, PLAIN) else _MISSING
            value = vars(module).get(name, default)
            if value is _MISSING or _is_constant(value):
                self._plain.append((places[owner], name, value, default))
            else:
                described = _described(value, registered, self._kept)
                self._deep.append((places[owner], name, described))
                self._kept.append(value)

    def of(self, modules: Sequence[nn.Module]) -> BoundGuards:
        """Return the guards of modules in the same order, such as the modules of a copy."""
        return BoundGuards(self._plain, self._deep, self._classes, modules)


class BoundGuards:
    """The guards of the modules of one wrapped module."""

    def __init__(self, plain: list, deep: list, classes: dict, modules: Sequence[nn.Module]):
        self._modules = modules
        self._names = [(i, name) for i, name, *_ in plain]
        self._places = [(vars(modules[i]), name, default) for i, name, _, default in plain]
        self._values = [value for _, _, value, _ in plain]
        self._deep = [(vars(modules[i]), name, i, value) for i, name, value in deep]
        self._deep += [(vars(base), name, i, value) for (base, name), (i, value) in classes.items()]
        self._registered = _registered(modules) if self._deep else set()

    def changed(self) -> str | None:
        """Return the attribute that has another value than in the trace; None if all have
        theirs."""
        values = [owner.get(name, default) for owner, name, default in self._places]
        # New objects of equal values are rare.
        if any(map(operator.is_not, values, self._values)):
            for (i, name), value, old in zip(self._names, values, self._values, strict=True):
                if value is not old and not _same(value, old):
                    return self._text(i, name)
        seen: dict[int, object] = {}  # layers share a configuration
        for owner, name, i, described in self._deep:
            value = owner.get(name, _MISSING)
            if id(value) not in seen:
                seen[id(value)] = _described(value, self._registered)
            if seen[id(value)] != described:
                return self._text(i, name)
        return None

    def _text(self, i: int, name: str) -> str:
        return f"{name} of {type(self._modules[i]).__name__}"


def _is_constant(value: object) -> bool:
    """Tell whether an object always stands for the same constant."""
    if type(value) is tuple:
        return all(isinstance(one, PLAIN) for one in value)
    return isinstance(value, _CONSTANT)


def _same(value: object, old: object) -> bool:
    if type(value) is not type(old):
        return False
    if isinstance(value, tuple) and isinstance(old, tuple):
        return len(value) == len(old) and all(map(_same, value, old))
    return isinstance(value, PLAIN) and value == old


def _base(kind: type, name: str) -> type | None:
    """Return the class that has an attribute with data; None if it is computed, or a function."""
    base = next((base for base in kind.__mro__ if name in vars(base)), None)
    has_data = base is not None and not hasattr(type(vars(base)[name]), "__get__")
    return base if has_data else None


def _described(
    value: object, registered: Collection[int], kept: list[object] | None = None
) -> object:
    """Return a value that later changes of this one do not change; objects by their data."""

    def tensor(one: torch.Tensor) -> object:
        # Parameters and buffers are arguments of the functions, whose values may change.
        return id(one), None if id(one) in registered else _contents(one)

    return snapshot(value, tensor, kept=kept)


def _contents(tensor: torch.Tensor) -> object:
    """Return a value that changes with the elements of a tensor: all, if they are few."""
    is_small = type(tensor) is torch.Tensor and tensor.numel() <= ELEMENTS and _is_plain(tensor)
    elements = tensor.detach().numpy().tobytes() if is_small else None
    return tensor._version, tensor.data_ptr() if tensor.is_cpu else None, elements


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and tensor.layout is torch.strided and tensor.dtype in _NUMPY


def _registered(modules: Sequence[nn.Module]) -> set[int]:
    """Return the identities of the parameters and buffers of modules."""
    tables = (table for module in modules for table in (module._parameters, module._buffers))
    return {id(tensor) for table in tables for tensor in table.values()}
