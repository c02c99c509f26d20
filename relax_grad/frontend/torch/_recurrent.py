"""Dropout between the layers of recurrent networks, which PyTorch's decompositions leave out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import torch
from torch._decomp import decompositions

_LAYERS = decompositions._rnn_helper


@contextlib.contextmanager
def dropout_between_layers() -> Iterator[None]:
    """Decompose recurrent networks layer by layer with dropout between the layers.

    PyTorch 2.13 compares the number of layers with the index of the layer the wrong way round, and drops nothing.
    """
    with mock.patch.object(decompositions, "_rnn_helper", _layers):
        yield


def _layers(
    data: torch.Tensor,
    hidden: Sequence,
    params: Sequence,
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    layer: Callable,
) -> tuple[torch.Tensor, list]:
    """Return the result and the last states, as PyTorch's function of the same arguments."""
    data = data.transpose(0, 1) if batch_first else data
    count, states = 1 + bidirectional, []
    for i in range(num_layers):
        if i and train and dropout:
            data = torch.dropout(data, dropout, train=True)
        own = slice(i * count, (i + 1) * count)
        data, new = _LAYERS(
            data, hidden[own], params[own], has_biases, 1, 0.0, train, bidirectional, False, layer
        )
        states += new
    return data.transpose(0, 1) if batch_first else data, states
