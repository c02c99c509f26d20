"""Recurrent networks layer by layer: as operators, and with dropout between the layers.

PyTorch's decompositions write out the steps, and leave the dropout out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from unittest import mock

import torch
import torch.nn.functional as F
from torch._decomp import decompositions

from .._operators import GRU, LSTM, RNN

_LAYERS = decompositions._rnn_helper


@contextlib.contextmanager
def layers_as_operators() -> Iterator[None]:
    """Decompose recurrent networks into operators of whole layers, with dropout between the layers.

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
    count, states, layer = 1 + bidirectional, [], _as_operator(layer)
    for i in range(num_layers):
        if i and train and dropout:
            data = torch.dropout(data, dropout, train=True)
        own = slice(i * count, (i + 1) * count)
        data, new = _LAYERS(
            data, hidden[own], params[own], has_biases, 1, 0.0, train, bidirectional, False, layer
        )
        states += new
    return data.transpose(0, 1) if batch_first else data, states


def _as_operator(layer: Callable) -> Callable:
    """Return a layer as an operator; layers of packed sequences stay as they are."""
    if layer in (decompositions.one_layer_lstm, decompositions.mkldnn_one_layer_lstm):
        return partial(_lstm, layer)
    if not isinstance(layer, partial) or layer.func is not decompositions.one_layer_rnn:
        return layer
    cell = layer.keywords["hidden_fn"]
    if cell is decompositions.gru_cell:
        return partial(_gru, layer)
    captured = [variable.cell_contents for variable in cell.__closure__ or ()]
    recurrence = next((RNN[function] for function in captured if function in RNN), None)
    return layer if recurrence is None else partial(_rnn, layer, recurrence)


def _lstm(steps: Callable, data, hidden, params, has_biases, reverse=False):
    """Return the hidden states of a layer and the last states; ``steps`` is the layer step by step."""
    if len(params) not in (2, 4):  # a projection
        return steps(data, hidden, params, has_biases, reverse)
    bias = params[2] + params[3] if has_biases else None
    products = F.linear(data, params[0], bias)
    products = products.flip(0) if reverse else products
    if not _of_one_dtype(products, *hidden, params[1]):
        return decompositions.one_layer_lstm(data, hidden, params, has_biases, reverse)
    states, cells = LSTM(products, *hidden, params[1])
    return states.flip(0) if reverse else states, (states[-1], cells[-1])


def _gru(steps: Callable, data, hidden, params, has_biases, reverse=False):
    size = hidden.shape[-1]
    bias, own = None, hidden.new_zeros(size)
    if has_biases:
        own = params[3][2 * size :]
        bias = params[2] + torch.cat([params[3][: 2 * size], torch.zeros_like(own)])
    products = F.linear(data, params[0], bias)
    products = products.flip(0) if reverse else products
    if not _of_one_dtype(products, hidden, params[1], own):
        return steps(data, hidden, params, has_biases, reverse)
    states = GRU(products, hidden, params[1], own)
    return states.flip(0) if reverse else states, states[-1]


def _rnn(steps: Callable, recurrence: Callable, data, hidden, params, has_biases, reverse=False):
    bias = params[2] + params[3] if has_biases else None
    products = F.linear(data, params[0], bias)
    products = products.flip(0) if reverse else products
    if not _of_one_dtype(products, hidden, params[1]):
        return steps(data, hidden, params, has_biases, reverse)
    states = recurrence(products, hidden, params[1])
    return states.flip(0) if reverse else states, states[-1]


def _of_one_dtype(*tensors: torch.Tensor) -> bool:
    """Tell whether tensors have one dtype, unlike those under autocast."""
    return len({tensor.dtype for tensor in tensors}) == 1
