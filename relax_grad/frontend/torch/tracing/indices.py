"""Integers in tensors without axes as indices, whose values PyTorch reads."""

from __future__ import annotations

from types import EllipsisType
from typing import Any

import torch

_BASIC = (int, slice, EllipsisType, type(None))


def has_numbers(index: object) -> bool:
    """Tell whether an index has an integer in a tensor without axes."""
    return any(map(_is_number, index if isinstance(index, tuple) else (index,)))


def _is_number(item: object) -> bool:
    return (
        isinstance(item, torch.Tensor)
        and not item.dim()
        and not (item.is_floating_point() or item.dtype is torch.bool)
    )


def at_numbers(data: torch.Tensor, index: object) -> tuple[torch.Tensor, tuple] | None:
    """Return a view of a tensor and an index with an axis of one element for ``data[index]``, or
    None for a mixture with other tensors.

    The view has the axes that the numbers select first.
    """
    items: list[Any] = list(index) if isinstance(index, tuple) else [index]
    places = [i for i, item in enumerate(items) if _is_number(item)]
    if places != list(range(places[0], places[-1] + 1)):
        return None
    rest = [slice(None) if i in places else item for i, item in enumerate(items)]
    if not all(isinstance(item, _BASIC) and not isinstance(item, bool) for item in rest):
        return None
    before = items[: places[0]]
    consumed = sum(item is not None and item is not ... for item in items)
    axis = sum(
        data.dim() - consumed if item is ... else not isinstance(item, int) for item in before
    )
    count = len(places)
    view = data[tuple(rest)].movedim(list(range(axis, axis + count)), list(range(count)))
    return view, tuple(items[i].reshape(1) for i in places)
