"""The setting of a training step that decides the results of its forward pass that are kept for its
backward pass."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, SupportsInt

from tvm import relax

from .._validation import check_integer, is_integer

#: The attribute of a function with the setting. The first result of the function is the loss.
REMAT = "relax_grad.remat"

#: The smallest cut, of bytes that are kept and of time for recomputation.
AUTO = "auto"

#: A cut whose recomputation takes a small share of the step's time.
LIGHT = "light"

#: The policies by their names in ``jax.checkpoint_policies``.
POLICIES = (
    "everything_saveable",
    "nothing_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
)


#: The callables by the names that stand for them in attributes, which cannot hold functions of
#: Python: TVM hashes and compares attributes. They stay for the life of the process, as a module
#: may outlive its step; each has one name.
_CALLABLES: dict[str, Callable[[relax.Call], bool]] = {}

_numbers = itertools.count()


def as_attribute(remat: str | int | Callable) -> str | int:
    """Return the value of the attribute for a setting. That of a callable is valid in this
    process."""
    if not callable(remat):
        return remat
    for name, known in list(_CALLABLES.items()):  # another thread may add one
        if known is remat:
            return name
    name = f"{getattr(remat, '__name__', 'callable')}:{next(_numbers)}"
    _CALLABLES[name] = remat
    return name


def from_attribute(value: str | SupportsInt) -> str | int | Callable:
    """Return the setting of an attribute, or raise ValueError if it is a callable of another
    process."""
    if not isinstance(value, str):
        return int(value)
    if value in (AUTO, LIGHT, *POLICIES):
        return str(value)
    if value not in _CALLABLES:
        raise ValueError(
            f"remat: the function {value} is unknown in this process; make the step again"
        )
    return _CALLABLES[value]


def is_portable(value: object) -> bool:
    """Tell whether an attribute means the same in every process."""
    return not isinstance(value, str) or value in (AUTO, LIGHT, *POLICIES)


def checked(remat: Any) -> str | int | Callable | None:
    """Return a setting, or raise for any other value."""
    if remat is None or callable(remat) or remat in (AUTO, LIGHT, *POLICIES):
        return remat
    names = ", ".join(map(repr, (LIGHT, AUTO, *POLICIES)))
    if not isinstance(remat, str) and not is_integer(remat):
        raise TypeError(
            f"remat must be None, {names}, a number of bytes or a function, but it is {remat!r}"
        )
    if isinstance(remat, str):
        raise ValueError(f"remat must be one of {names}, but it is {remat!r}")
    return check_integer("remat", remat, 1, of="bytes")
