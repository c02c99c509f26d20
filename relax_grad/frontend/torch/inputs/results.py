"""The tensors in a module's result: their names, and the loss among them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.utils import _pytree as pytree

from .names import key_name


def named_tensors(result: object) -> dict[str, torch.Tensor]:
    """Return the tensors of a nested result by their names; other leaves are left out.

    Equal names, as of the keys 1 and "1", end with underscores.
    """
    named: dict[str, torch.Tensor] = {}
    for path, leaf in pytree.tree_flatten_with_path(result)[0]:
        if isinstance(leaf, torch.Tensor):
            name = ".".join(map(key_name, path)) or "output"
            while name in named:
                name += "_"
            named[name] = leaf
    return named


def loss_of(result: object) -> torch.Tensor | None:
    """Return the loss in a module's result, or None."""
    if isinstance(result, Mapping):
        result = result.get("loss")
    elif isinstance(result, (tuple, list)):
        result = result[0] if result else None
    else:
        result = getattr(result, "loss", result)
    return result if is_loss(result) else None


def is_loss(value: object) -> bool:
    """Tell whether a value may be a loss: a floating-point tensor of one element."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return False
    return all(isinstance(extent, int) and extent == 1 for extent in value.shape)
