"""The attributes of modules that a trace has read, whose values are constants of compiled
functions."""

from __future__ import annotations

import dataclasses
import functools
import operator
import types
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..tracing.state import frozen, identity

#: It stands for an attribute that a module does not have.
_MISSING = object()

#: Values that do not change, of which equal ones are the same constant.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)

#: Values that count as themselves, whatever attributes they have.
_OPAQUE = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, nn.Module)

#: The depth of lists, mappings and objects that are compared.
_DEPTH = 4

#: The number of elements of a tensor down to which all are compared: NumPy may share its memory.
_ELEMENTS = 256

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
            default = _default(type(module), name)
            value = vars(module).get(name, default)
            if value is _MISSING or _is_constant(value):
                self._plain.append((places[owner], name, value, default))
            else:
                self._deep.append((places[owner], name, _described(value, registered)))
                self._kept += [value, pytree.tree_leaves(value)]

    def of(self, modules: Sequence[nn.Module]) -> BoundGuards:
        """Return the guards of modules in the same order, such as the modules of a copy."""
        return BoundGuards(self._plain, self._deep, modules)


class BoundGuards:
    """The guards of the modules of one wrapped module."""

    def __init__(self, plain: list, deep: list, modules: Sequence[nn.Module]):
        self._modules = modules
        self._names = [(i, name) for i, name, *_ in plain]
        self._places = [(vars(modules[i]), name, default) for i, name, _, default in plain]
        self._values = [value for _, _, value, _ in plain]
        self._deep = [(vars(modules[i]), name, i, value) for i, name, value in deep]
        self._registered = _registered(modules) if deep else set()

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
        return all(isinstance(one, _PLAIN) for one in value)
    return isinstance(value, (*_PLAIN, *_OPAQUE))


def _same(value: object, old: object) -> bool:
    if type(value) is not type(old):
        return False
    if isinstance(value, tuple) and isinstance(old, tuple):
        return len(value) == len(old) and all(map(_same, value, old))
    return isinstance(value, _PLAIN) and value == old


def _default(kind: type, name: str) -> object:
    """Return the value of a class attribute that holds data."""
    for base in kind.__mro__:
        if name in vars(base):
            value = vars(base)[name]
            return value if isinstance(value, _PLAIN) else _MISSING
    return _MISSING


def _described(value: object, registered: Collection[int], depth: int = _DEPTH) -> object:
    """Return a value that later changes of this one do not change; objects by their data."""

    def inner(part: object) -> object:
        return _described(part, registered, depth - 1)

    if isinstance(value, torch.Tensor):
        # Parameters and buffers are arguments of the functions, whose values may change.
        return id(value), None if id(value) in registered else _contents(value)
    if isinstance(value, _OPAQUE) or not depth:
        return type(value), frozen(value, depth)
    if isinstance(value, (list, tuple, deque)):
        return type(value), list(map(inner, value))
    if isinstance(value, Mapping):
        items = list(value.items())[:_ELEMENTS]
        return type(value), len(value), [(id(key), inner(item)) for key, item in items]
    if isinstance(value, functools.partial):
        parts = value.func, value.args, value.keywords
        return type(value), id(value.func), *map(inner, parts)
    members = getattr(value, "__dict__", None)
    if isinstance(members, dict) and not isinstance(value, types.MethodType):
        names = [name for name, one in members.items() if _is_data(name, one)]
        return type(value), [(name, inner(members[name])) for name in names]
    return type(value), frozen(value, depth)


def _is_data(name: str, value: object) -> bool:
    """Tell whether a member of an object is data or has data, and is not a note of how a library
    has called the object."""
    if isinstance(value, _PLAIN):
        return True
    is_table = isinstance(value, (list, tuple, dict, types.SimpleNamespace))
    return not name.startswith("_") and (is_table or dataclasses.is_dataclass(value))


def _contents(tensor: torch.Tensor) -> object:
    """Return a value that changes with the elements of a tensor: all, if they are few."""
    is_small = type(tensor) is torch.Tensor and tensor.numel() <= _ELEMENTS and _is_plain(tensor)
    elements = tensor.detach().numpy().tobytes() if is_small else None
    return tensor._version, tensor.data_ptr() if tensor.is_cpu else None, elements


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and tensor.layout is torch.strided and tensor.dtype in _NUMPY


def _registered(modules: Sequence[nn.Module]) -> set[int]:
    """Return the identities of the parameters and buffers of modules."""
    tables = (table for module in modules for table in (module._parameters, module._buffers))
    return {id(tensor) for table in tables for tensor in table.values()}
