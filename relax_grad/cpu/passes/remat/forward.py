"""The forward pass of a training step."""

from __future__ import annotations

from collections.abc import Iterable

from ..reorder import Tensors

#: Tensors with at most the bytes of the forward pass divided by this number are small.
_SMALL = 1024


def forward_pass(tensors: Tensors, loss: Iterable[int]) -> set[int]:
    """Return the numbers of the bindings of the forward pass; none if no binding computes the loss.

    They are those that the loss depends on, and those that compute small tensors from their results
    alone, such as new running statistics.

    Parameters
    ----------
    tensors : Tensors
        The tensors of the bindings.
    loss : Iterable[int]
        The tensors of the loss.
    """
    maker = {t: i for i, made in enumerate(tensors.makes) for t in made}
    forward: set[int] = set()
    pending = [maker[t] for t in loss]
    while pending:
        i = pending.pop()
        if i not in forward:
            forward.add(i)
            pending += tensors.needs[i]
    small = sum(tensors.sizes[t] for i in forward for t in tensors.makes[i]) / _SMALL
    for i, made in enumerate(tensors.makes):
        is_small = sum(tensors.sizes[t] for t in made) <= small
        if forward and is_small and tensors.needs[i] <= forward:
            forward.add(i)
    return forward
