"""Equal symbolic extents of operands that torch.export does not compare.

A comparison in the trace gives them one symbol. Otherwise operands of other extents would pass, and
gradients would have shapes that differ from the operands'.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def compare_extents(function: Callable, args: Sequence, kwargs: dict) -> None:
    """Compare the extents of the operands of a call that PyTorch has accepted."""
    compare = _COMPARED.get(getattr(function, "__name__", ""))
    if compare is not None:
        compare(*args, **kwargs)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *_: Any,
    **__: Any,
) -> None:
    rank = query.dim()
    if not rank == key.dim() == value.dim():
        return
    queries, keys = query.shape, key.shape
    _unify(keys[: rank - 2], queries[: rank - 2])
    _unify(keys[-1:], queries[-1:])
    _unify(keys[:-1], value.shape[:-1])
    if attn_mask is not None:
        _unify(attn_mask.shape, (*queries[:-1], keys[-2]))


def _written(data: torch.Tensor, index: Any, value: Any, *_: Any, **__: Any) -> None:
    """Compare written values with the elements at their places."""
    if not isinstance(value, torch.Tensor) or not any(map(_is_symbolic, value.shape)):
        return
    index = [index] if isinstance(index, torch.Tensor) or not _is_several(index) else index
    tensors = [one for one in index if isinstance(one, torch.Tensor)]
    if tensors and not any(one.dtype is torch.bool for one in tensors):
        _unify(value.shape, data[tuple(index)].shape)


def _is_several(index: Any) -> bool:
    return isinstance(index, (list, tuple))


def _put(data: torch.Tensor, indices: Sequence, values: torch.Tensor, *_: Any, **__: Any) -> None:
    _written(data, [slice(None) if one is None else one for one in indices], values)


def _reduced(
    data: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, *_: Any, **__: Any
) -> None:
    if source.dim():
        _unify(index.shape, source.shape[dim : dim + 1 or None])


def _unify(extents: Sequence, others: Sequence) -> None:
    """Give extents that are equal in the trace one symbol, or one number; the last are compared."""
    for extent, other in zip(reversed(extents), reversed(others), strict=False):
        if _is_symbolic(extent) or _is_symbolic(other):
            first, second = map(_hint, (extent, other))
            if first == second:  # others may be broadcast
                torch._check(extent == other)


def _is_symbolic(extent: int | torch.SymInt) -> bool:
    return isinstance(extent, torch.SymInt)


def _hint(extent: int | torch.SymInt) -> int | None:
    return extent.node.hint if isinstance(extent, torch.SymInt) else extent


_COMPARED: dict[str, Callable] = {
    "scaled_dot_product_attention": _attention,
    "__setitem__": _written,
    "index_put": _put,
    "index_put_": _put,
    "index_reduce": _reduced,
    "index_reduce_": _reduced,
}
