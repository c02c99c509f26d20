"""Keys of kernels: equal only where the functions are equal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from types import FunctionType
from typing import TypeGuard

import numpy as np
import tvm_ffi
from tvm import tirx

from ...ir.compat import dtype_of
from ..tuning import Tuning

_PACKAGE = __package__.partition(".")[0]


def key_of(value: object) -> tuple:
    """Return a hashable key for a generator or for one of its arguments."""
    if type(value) in (int, bool, str):  # most arguments; the tests of classes of TVM are slow
        return type(value), value
    if isinstance(value, partial):
        return value.func, key_of(value.args), key_of(sorted(value.keywords.items()))
    if isinstance(value, (list, tuple)):
        return "list", *map(key_of, value)
    if isinstance(value, Tuning):
        return Tuning, value.digest
    if is_dataclass(value):
        return type(value), *(key_of(getattr(value, field.name)) for field in fields(value))
    if isinstance(value, tirx.Var):
        return tirx.Var, value.name, dtype_of(value.ty)
    if isinstance(value, tvm_ffi.Object):  # an extent made of variables
        return tvm_ffi.Object, str(value)
    if isinstance(value, float):
        return type(value), value.hex()  # 0.0 equals -0.0
    return type(value), value


def text_of(key: object) -> str | None:
    """Return a text of a key that is the same in every process; None if a part of it has no such
    text."""
    try:
        return _text(key)
    except TypeError:
        return None


def _text(part: object) -> str:
    if isinstance(part, tuple):
        return f"({','.join(map(_text, part))})"
    if isinstance(part, type):
        return f"{part.__module__}:{part.__qualname__}"
    if isinstance(part, Enum):
        return part.name  # the type precedes it in the key
    if isinstance(part, np.generic):
        return repr(part.item())
    if isinstance(part, str):
        return repr("" + part)  # strings of TVM are of a subclass
    if part is None or type(part) in (bool, int):
        return repr(part)
    if callable(part) and _is_own(part):
        return f"{part.__module__}:{part.__qualname__}"
    raise TypeError(f"{part!r} has no representation that is the same in each process")


def _is_own(function: Callable) -> TypeGuard[FunctionType]:
    """Tell whether a module of this package defines this function under its name."""
    module = getattr(function, "__module__", None) or ""
    if module.partition(".")[0] != _PACKAGE:
        return False
    name = getattr(function, "__qualname__", "")
    return getattr(sys.modules.get(module), name, None) is function
