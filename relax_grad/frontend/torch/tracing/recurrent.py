"""Recurrent networks layer by layer: as operators, and with dropout between the layers.

PyTorch's decompositions write out the steps, and leave the dropout out. Under autocast, they are
applied while the module runs, because a trace has the operators that autocast calls: it would have
a layer of the dtypes before the casts.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch._decomp import decompositions

from .._operators import GRU, LSTM, PREVIOUS, RNN
from .packed import Lengths

_LAYERS = decompositions._rnn_helper

#: The layers of PyTorch step by step: of LSTMs, and of the others, whose cell is an argument.
_LSTMS = (
    decompositions.one_layer_lstm,
    decompositions.mkldnn_one_layer_lstm,
    decompositions.one_layer_lstm_data,
)
_OTHERS = (decompositions.one_layer_rnn, decompositions.one_layer_rnn_data)
_GRU_CELLS = (decompositions.gru_cell, decompositions.gru_cell_data)

#: The decompositions of PyTorch's functions of recurrent networks, by name.
_NETWORKS = {
    "lstm": decompositions.lstm_impl,
    "gru": decompositions.gru_impl,
    "rnn_tanh": decompositions.rnn_tanh_input,
    "rnn_relu": decompositions.rnn_relu_input,
}


def _lstm_cell(
    data: torch.Tensor,
    hidden: torch.Tensor,
    input_weight: torch.Tensor,
    weight: torch.Tensor | None,
    input_bias: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> Any:
    products = F.linear(data, input_weight, input_bias)
    return decompositions.lstm_cell(products, *hidden, weight, bias, None, 1)


def _cell(function: Callable) -> Callable:
    """Return a cell whose arguments are in the order of PyTorch's function."""
    return lambda data, hidden, input_weight, weight, input_bias=None, bias=None: function(
        data, hidden, input_weight, input_bias, weight, bias
    )


#: The same, of cells.
_CELLS = {
    "lstm_cell": _lstm_cell,
    "gru_cell": _cell(decompositions.gru_cell_data),
    "rnn_tanh_cell": _cell(decompositions.rnn_cell_data(torch.tanh)),
    "rnn_relu_cell": _cell(decompositions.rnn_cell_data(torch.relu)),
}


def decomposed_under_autocast(function: Callable, args: Sequence) -> Callable:
    """Return the function to call instead of a function of PyTorch: the decomposition of a
    recurrent network or cell under autocast."""
    if not torch.is_autocast_enabled("cpu") or len(args) < 3:
        return function
    # A network has a list of weights; packed sequences have one at another place.
    known = _NETWORKS if isinstance(args[2], (list, tuple)) else _CELLS
    return known.get(getattr(function, "__name__", ""), function)


@contextlib.contextmanager
def layers_as_operators() -> Iterator[None]:
    """Decompose recurrent networks into operators of whole layers, with dropout between the layers.

    PyTorch 2.13 compares the number of layers with the index of the layer the wrong way round, and
    drops nothing.
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
    """Return a layer as an operator, of whole or of packed sequences."""
    function, keywords = layer, {}
    if isinstance(layer, partial):
        function, keywords = layer.func, layer.keywords
    order: _Whole | _Packed | Lengths = _Whole()
    if "batch_sizes" in keywords:
        sizes = keywords["batch_sizes"]
        order = sizes if isinstance(sizes, Lengths) else _Packed(sizes)
    if function in _LSTMS:
        if function is decompositions.mkldnn_one_layer_lstm:
            layer = decompositions.one_layer_lstm  # of any dtype
        return partial(_lstm, layer, order)
    if function not in _OTHERS:
        return layer
    cell = keywords["hidden_fn"]
    if cell in _GRU_CELLS:
        return partial(_gru, layer, order)
    captured = [closure_cell.cell_contents for closure_cell in cell.__closure__ or ()]
    recurrence = next(
        (RNN[cell_function] for cell_function in captured if cell_function in RNN), None
    )
    return layer if recurrence is None else partial(_rnn, layer, recurrence, order)


class _Whole:
    """The order of the steps of sequences of the same length, ``(steps, batch, features)``."""

    #: Whether all sequences have the same length.
    has_one_length = True

    def steps(self, data: torch.Tensor, reverse: bool) -> torch.Tensor:
        """Return the steps in the order of a direction."""
        return data.flip(0) if reverse else data

    def back(self, states: torch.Tensor, reverse: bool) -> torch.Tensor:
        """Return the states of :meth:`steps` in the order of the data."""
        return self.steps(states, reverse)

    def last(self, states: torch.Tensor) -> torch.Tensor:
        """Return the states after the last step of each sequence."""
        return states[-1]


class _Packed:
    """The order of the steps of packed sequences, ``(elements, features)``, whose lengths descend.

    Parameters
    ----------
    sizes : Sequence[int]
        The number of sequences that have each step.
    """

    def __init__(self, sizes: Sequence[int]):
        self._steps, self._batch = len(sizes), sizes[0]
        self.has_one_length = sizes[0] == sizes[-1]
        starts = [0, *itertools.accumulate(sizes)]
        self._lengths = [sum(size > i for size in sizes) for i in range(self._batch)]
        # A step after the end of a sequence reads its own last element: no other sequence can make
        # it NaN. No result reads the states there.
        clamped = [[min(t, length - 1) for length in self._lengths] for t in range(self._steps)]
        self._places = [[starts[t] + i for i, t in enumerate(row)] for row in clamped]
        self._reversed = [
            [starts[length - 1 - t] + i for i, (t, length) in enumerate(self._of(row))]
            for row in clamped
        ]
        self._elements = [(t, i) for t, size in enumerate(sizes) for i in range(size)]

    def _of(self, row: Sequence[int]) -> Iterator[tuple[int, int]]:
        return zip(row, self._lengths, strict=True)

    def steps(self, data: torch.Tensor, reverse: bool) -> torch.Tensor:
        places = self._reversed if reverse else self._places
        rows = data.index_select(0, _indices(itertools.chain(*places), data))
        return rows.reshape(self._steps, self._batch, -1)

    def back(self, states: torch.Tensor, reverse: bool) -> torch.Tensor:
        turned = ((self._lengths[i] - 1 - t if reverse else t, i) for t, i in self._elements)
        return self._taken(states, turned)

    def last(self, states: torch.Tensor) -> torch.Tensor:
        return self._taken(states, ((length - 1, i) for i, length in enumerate(self._lengths)))

    def _taken(self, states: torch.Tensor, places: Iterator[tuple[int, int]]) -> torch.Tensor:
        rows = states.reshape(self._steps * self._batch, -1)
        return rows.index_select(0, _indices((t * self._batch + i for t, i in places), rows))


def _indices(numbers: Iterator[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(list(numbers), dtype=torch.int64, device=like.device)


def _lstm(
    steps: Callable,
    order: _Whole | _Packed | Lengths,
    data: torch.Tensor,
    hidden: tuple,
    params: tuple,
    has_biases: bool,
    reverse: bool = False,
) -> tuple[object, tuple]:
    """Return the hidden states of a layer and the last states; ``steps`` is the layer step by step.

    With a projection P, the hidden states are ``m @ P^T``. So the recurrence of m has the weight
    ``W @ P`` and no hidden state at the start, whose product is added to the data of the first
    step.
    """
    weight = params[1]
    bias = params[2] + params[3] if has_biases else None
    products = order.steps(F.linear(data, params[0], bias), reverse)
    projection = params[-1] if len(params) in (3, 5) else None
    start, cell = hidden
    if not _of_one_dtype(products, *hidden, *params):
        if not torch.is_autocast_enabled("cpu"):
            return steps(data, hidden, params, has_biases, reverse=reverse)
        # Of one length and without a projection, autocast calls a layer of its dtype. Others
        # multiply numbers of its dtype, and add to separate cells.
        dtype = products.dtype
        if projection is not None or not order.has_one_length:
            dtype = torch.promote_types(dtype, cell.dtype)
        tensors = _under_autocast(dtype, products, [weight], [start, cell])
        products, weight, start, cell = tensors
    if projection is not None:
        first = F.linear(start, weight).to(products.dtype)
        products = products + PREVIOUS(torch.zeros_like(products), first)
        weight, start = (weight @ projection).to(products.dtype), torch.zeros_like(cell)
    states, cells = LSTM(products, start, cell, weight)
    if projection is not None:
        states = F.linear(states, projection)
    return order.back(states, reverse), (order.last(states), order.last(cells))


def _gru(
    steps: Callable,
    order: _Whole | _Packed | Lengths,
    data: torch.Tensor,
    hidden: torch.Tensor,
    params: tuple,
    has_biases: bool,
    reverse: bool = False,
) -> tuple:
    size = hidden.shape[-1]
    bias, own = None, hidden.new_zeros(size)
    if has_biases:
        own = params[3][2 * size :]
        bias = params[2] + torch.cat([params[3][: 2 * size], torch.zeros_like(own)])
    products, weight = order.steps(F.linear(data, params[0], bias), reverse), params[1]
    if not _of_one_dtype(products, hidden, weight, own):
        if not torch.is_autocast_enabled("cpu"):
            return steps(data, hidden, params, has_biases, reverse=reverse)
        dtype = torch.promote_types(products.dtype, hidden.dtype)
        tensors = _under_autocast(dtype, products, [weight, own], [hidden])
        products, weight, own, hidden = tensors
    states = GRU(products, hidden, weight, own)
    return order.back(states, reverse), order.last(states)


def _rnn(
    steps: Callable,
    recurrence: Callable,
    order: _Whole | _Packed | Lengths,
    data: torch.Tensor,
    hidden: torch.Tensor,
    params: tuple,
    has_biases: bool,
    reverse: bool = False,
) -> tuple:
    bias = params[2] + params[3] if has_biases else None
    products, weight = order.steps(F.linear(data, params[0], bias), reverse), params[1]
    if not _of_one_dtype(products, hidden, weight):
        if not torch.is_autocast_enabled("cpu"):
            return steps(data, hidden, params, has_biases, reverse=reverse)
        tensors = _under_autocast(products.dtype, products, [weight], [hidden])
        products, weight, hidden = tensors
    states = recurrence(products, hidden, weight)
    return order.back(states, reverse), order.last(states)


def _of_one_dtype(*tensors: torch.Tensor) -> bool:
    """Tell whether tensors have one dtype, unlike those under autocast."""
    return len({tensor.dtype for tensor in tensors}) == 1


def _under_autocast(
    dtype: torch.dtype,
    products: torch.Tensor,
    weights: Sequence[torch.Tensor],
    states: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """Return the products, the weights and the states of a recurrence in its dtype.

    The weights are rounded to the dtype of autocast, as for the products. The states keep their
    numbers, where the dtype is theirs.
    """
    rounded = [weight.to(products.dtype) for weight in weights]
    return [tensor.to(dtype) for tensor in (products, *rounded, *states)]
