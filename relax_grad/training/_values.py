"""Values of Python as JSON: the further values of ``Trainer.save``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from .._validation import described as shortened
from ._files import MOST_DEPTH

#: The key of an object that stands for a dict with other keys than text, which JSON lacks.
#: Schedulers of PyTorch have such dicts: the milestones of ``MultiStepLR`` are a Counter.
_KIND = "relax_grad.kind"
_KINDS = {"dict": dict, "Counter": Counter}


def described(value: object, place: str, depth: int = 0) -> Any:
    """Return a value for JSON. ``place`` is its name in errors, and ``depth`` the number of lists
    and mappings around it.

    Raises
    ------
    TypeError
        If it has values of other types than numbers, text, lists and mappings.
    ValueError
        If it is nested deeper than a file can be.
    """
    if depth > MOST_DEPTH:
        raise ValueError(f"{place[:100]}... is nested more than {MOST_DEPTH} deep in the file")
    if isinstance(value, Mapping):
        members = {
            key: described(one, f"{place}[{key!r}]", depth + 1) for key, one in value.items()
        }
        kind = "Counter" if isinstance(value, Counter) else "dict"
        if kind == "dict" and _KIND not in members and all(isinstance(k, str) for k in members):
            return members
        for key in members:
            if not isinstance(key, str | int | float | None):
                raise TypeError(f"keys of {place} must be text or numbers, but one is {key!r}")
        return {_KIND: kind, "items": [list(item) for item in members.items()]}
    if isinstance(value, list | tuple):
        return [described(one, f"{place}[{i}]", depth + 1) for i, one in enumerate(value)]
    if value is None or isinstance(value, str | int | float):
        return value
    remedy = "leave it out" if callable(value) else "pass numbers, text, lists and dicts of them"
    if hasattr(value, "tolist"):
        remedy = f"pass {place}.tolist()"
    raise TypeError(
        f"a file holds no {type(value).__name__}, but {place} is {shortened(value)}: {remedy}"
    )


def restored(value: Any) -> Any:
    """Return the value that :func:`described` returned a description of."""
    if isinstance(value, list):
        return [restored(one) for one in value]
    if not isinstance(value, dict):
        return value
    kind, items = value.get(_KIND), value.get("items")
    if kind is None:
        return {key: restored(one) for key, one in value.items()}
    is_list = isinstance(items, list) and all(isinstance(i, list) and len(i) == 2 for i in items)
    if items is None or kind not in _KINDS or not is_list:
        raise ValueError(f"further values have an unknown object {str(value)[:100]}")
    return _KINDS[kind]({key: restored(one) for key, one in items})


def named(more: object) -> dict:
    """Return the further values of a file, or raise TypeError if they have no names."""
    if more is not None and not isinstance(more, Mapping):
        raise TypeError(
            f'more must be values by their names, such as {{"note": "a text"}}, but it is '
            f"{shortened(more)}"
        )
    return dict(more or {})
