"""A function of the library "torch"."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Function", "in_float32"]


@dataclass(frozen=True)
class Function:
    """A function of the library.

    Attributes
    ----------
    compute : Callable
        Takes PyTorch, the operands with their numbers, and the results, and writes to the results.
    results : int
        The number of results.
    is_product : bool
        Whether the precision applies to it.
    kept_operands, kept_results : tuple[int, ...]
        The places of tensors that keep their dtype in precision bfloat16.
    """

    compute: Callable[[Any, Sequence, Sequence], None]
    results: int = 1
    is_product: bool = False
    kept_operands: tuple[int, ...] = ()
    kept_results: tuple[int, ...] = ()


def in_float32(torch: Any, tensors: Sequence) -> list:
    """Return tensors for a sum: on a CPU, tensors of half precision in float32.

    PyTorch's functions for GPUs accumulate in float32 by themselves.
    """
    halves = (torch.float16, torch.bfloat16)
    return [
        each.float() if each.device.type == "cpu" and each.dtype in halves else each
        for each in tensors
    ]
