"""Snapshots of the values of attributes, which later changes of the values do not change."""

from __future__ import annotations

import functools
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import nn

#: Values that do not change, of which equal ones are the same constant.
PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)

#: Values that count as themselves, whatever attributes they have.
OPAQUE = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, nn.Module)

#: The number of elements down to which arrays and tensors are compared.
ELEMENTS = 256

#: The depth of containers and objects that are compared, and the number of parts of one value.
_DEPTH, _PARTS = 4, 2048

#: The folders of this package and of Python's library.
_PACKAGE, _LIBRARY = str(Path(__file__).parents[3]), sysconfig.get_paths()["stdlib"]


def snapshot(
    value: object,
    tensor: Callable[[torch.Tensor], object],
    *,
    sees_libraries: bool = True,
    kept: list[object] | None = None,
) -> object:
    """Return the parts of containers and objects, and the identities of other values.

    Parameters
    ----------
    value : object
        The value of an attribute.
    tensor : Callable
        Returns the snapshot of a tensor.
    sees_libraries : bool
        Whether the snapshot has the data of objects whose class a library defines. Libraries note
        in objects, such as a configuration, how they were called.
    kept : list, optional
        It takes the values whose identities the snapshot has.
    """
    left = _PARTS

    def same(value: object) -> object:
        if kept is not None:
            kept.append(value)
        return type(value), id(value)

    def visit(value: object, depth: int) -> object:
        nonlocal left
        left -= 1
        if isinstance(value, PLAIN):
            return type(value), value
        if isinstance(value, torch.Tensor):
            if kept is not None:
                kept.append(value)
            return tensor(value)
        if isinstance(value, np.ndarray) and value.size <= ELEMENTS and not value.dtype.hasobject:
            return value.shape, value.dtype, value.tobytes()
        if isinstance(value, OPAQUE) or not depth or left < 0:
            return same(value)
        if isinstance(value, (list, tuple, deque, set, frozenset)):
            return type(value), len(value), [visit(part, depth - 1) for part in _first(value)]
        if isinstance(value, Mapping):
            names = [key if isinstance(key, PLAIN) else same(key) for key in _first(value)]
            return (
                type(value),
                len(value),
                names,
                [visit(value[key], depth - 1) for key in _first(value)],
            )
        if isinstance(value, functools.partial):
            of_call: tuple[object, ...] = value.func, value.args, value.keywords
            return type(value), [visit(part, depth) for part in of_call]
        if isinstance(value, types.MethodType):
            return id(value.__func__), visit(value.__self__, depth - 1)
        kind = value if isinstance(value, type) else type(value)
        is_own = is_users(kind.__module__)
        if not is_own and not sees_libraries:
            return same(value)
        parts = [(name, part) for name, part in _members(value, is_own)]
        if not parts:
            return same(value)
        return kind, [(name, visit(part, depth - 1)) for name, part in parts]

    return visit(value, _DEPTH)


def _first(values: torch.Size) -> list:
    """Return the first elements of a container."""
    return [*values][:ELEMENTS]


def _members(value: object, is_own: bool) -> Iterator[tuple[str, object]]:
    """Yield the names and the values of the data of an object, or of a class of the user."""
    if isinstance(value, type):
        if is_own:
            yield from _data_of_class(value)
        return
    members = getattr(value, "__dict__", None)
    if isinstance(members, dict):
        for name, part in list(members.items())[:ELEMENTS]:
            if is_own or _is_data(name, part):
                yield name, part
    # A class is hashable, which mypy does not see through the cache.
    for name in _slots(type(value)):  # type: ignore[arg-type]
        if hasattr(value, name):
            yield name, getattr(value, name)
    if is_own:
        yield from _data_of_class(type(value))


def _is_data(name: str, value: object) -> bool:
    """Tell whether a member of a library's object is data or has data, and is not a note of how the
    library has called the object."""
    if isinstance(value, PLAIN):
        return True
    is_object = hasattr(value, "__dict__") and is_users(type(value).__module__)
    return not name.startswith("_") and (isinstance(value, (list, tuple, dict)) or is_object)


def _data_of_class(kind: type) -> Iterator[tuple[str, object]]:
    for base in kind.__mro__:
        if is_users(base.__module__):
            for name, value in vars(base).items():
                if isinstance(value, (*PLAIN, list, tuple, dict)) and not name.startswith("__"):
                    yield name, value


@functools.cache
def _slots(kind: type) -> tuple[str, ...]:
    """Return the names of the attributes of an object that has no dictionary for them."""
    names: list[str] = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        own = [slots] if isinstance(slots, str) else list(slots)
        names += [f"_{base.__name__.lstrip('_')}{n}" if n.startswith("__") else n for n in own]
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


@functools.cache
def is_users(module: str) -> bool:
    """Tell whether a module is the user's, and not of a library. The data classes of Python's
    module ``types`` are the user's, too."""
    if module == "types":
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return module not in sys.builtin_module_names
    return is_users_file(file) and not file.startswith(_LIBRARY)


@functools.cache
def is_users_file(file: str) -> bool:
    """Tell whether a file is the user's, and not of a package, which reads all attributes."""
    return "site-packages" not in file and not file.startswith(_PACKAGE)
