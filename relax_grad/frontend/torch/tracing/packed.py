"""Packed sequences: of lengths that are numbers at the trace, and of lengths that are tensors.

PyTorch's operators of packed sequences read the lengths from tensors, which have no values in a
trace. A trace knows the lengths that the module makes from numbers, and the operators on them are
replaced with others of known extents. For other lengths, the padded sequences stand in for the
packed ones, and masks for their ends.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._decomp import decompositions

_RECURRENT = {
    "gru": decompositions.gru_impl_data,
    "lstm": decompositions.lstm_data_impl,
    "rnn_tanh": decompositions.rnn_tanh_data,
    "rnn_relu": decompositions.rnn_relu_data,
}


class PackedSequences:
    """The known lengths and batch sizes of a trace."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[torch.Tensor, list[int]]] = {}
        self._masked: dict[int, tuple[torch.Tensor, Lengths]] = {}

    def replacement(self, function: Callable, args: Sequence) -> Callable:
        """Return the function to call instead of a function of PyTorch."""
        name = getattr(function, "__name__", "")
        if name in ("tensor", "as_tensor") and _are_numbers(args[0]):
            return lambda data, **options: self._noted(function(data, **options), list(data))
        keeps_numbers = name in ("to", "cpu", "long", "sort", "__getitem__")
        numbers = self._numbers(args[0]) if keeps_numbers else None
        if numbers:
            if name == "__getitem__":
                return (lambda _, place: numbers[place]) if type(args[1]) is int else function
            if name == "sort":
                return lambda *rest, **options: self._sorted(function, numbers, rest, options)
            return lambda *rest, **options: self._noted(function(*rest, **options), numbers)
        if any(id(arg) in self._masked for arg in args):
            return self._replacement_of_masked(function, name, args)
        sizes = self._numbers(args[1]) if len(args) > 1 else None
        if name == "_pack_padded_sequence" and sizes is None:
            return self._stand_in
        if sizes is None:
            return function
        if name in _RECURRENT:
            return lambda data, _, *rest: _RECURRENT[name](data, sizes, *rest)
        if name == "_pack_padded_sequence":
            return lambda data, _, batch_first: self._pack(data, sizes, batch_first)
        if name == "_pad_packed_sequence":
            return lambda data, _, *rest: self._pad(data, sizes, *rest)
        return function

    def _replacement_of_masked(self, function: Callable, name: str, args: Sequence) -> Callable:
        """Return the function for padded sequences that stand in for packed ones."""
        if name == "dim" and len(args[0].shape) == 3:
            return lambda *_: 2  # elements and features, for the checks of recurrent layers
        if name in ("dim", "size", "__get__"):
            return function
        lengths = next(self._masked[id(arg)][1] for arg in args if id(arg) in self._masked)
        if name == "__getitem__" and args[1] == 0:
            return lambda *_: lengths.batch  # of the batch sizes
        if name in _RECURRENT and id(args[1]) in self._masked:

            def layers(data: torch.Tensor, _: object, *rest: Any) -> Any:
                data, *states = _RECURRENT[name](data, lengths, *rest)
                return self._marked(data, lengths), *states

            return layers
        if name == "_pad_packed_sequence":
            return lambda data, _, *rest: _padded(data, lengths, *rest)
        raise NotImplementedError(
            f"{name} reads a packed sequence whose lengths are known at run time only: recurrent "
            "layers and pad_packed_sequence take it; pad the sequence first, or give "
            "pack_padded_sequence a list of numbers"
        )

    def _stand_in(self, data: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> Any:
        """Return padded sequences instead of packed ones, and a tensor for the batch sizes."""
        data = data.transpose(0, 1) if batch_first else data
        lengths = Lengths(lengths, *data.shape[:2])
        sizes = lengths.value.new_full((1,), 1)
        # A NaN after an end would pass into the gradients of weights.
        return self._marked(lengths.masked(data), lengths), self._marked(sizes, lengths)

    def _marked(self, tensor: torch.Tensor, lengths: Lengths) -> torch.Tensor:
        self._masked[id(tensor)] = tensor, lengths  # the tensor keeps its identity
        return tensor

    def _numbers(self, value: object) -> list[int] | None:
        packed = self._known.get(id(value))
        return packed[1] if packed else None

    def _noted(self, tensor: torch.Tensor, numbers: list[int]) -> torch.Tensor:
        self._known[id(tensor)] = tensor, numbers  # the tensor keeps its identity
        return tensor

    def _sorted(self, function: Callable, numbers: list[int], args: tuple, options: dict) -> Any:
        packed = function(*args, **options)
        self._noted(packed[0], sorted(numbers, reverse=options.get("descending", False)))
        return packed

    def _pack(self, data: torch.Tensor, lengths: list[int], batch_first: bool) -> Any:
        """Return the valid elements, time by time, and their number at each time."""
        data = data.transpose(0, 1) if batch_first else data
        if any(length < other for length, other in itertools.pairwise(lengths)):
            raise ValueError(
                "the lengths must descend; give pack_padded_sequence enforce_sorted=False"
            )
        sizes = [sum(length > time for length in lengths) for time in range(lengths[0])]
        packed = torch.cat([data[time, :size] for time, size in enumerate(sizes)])
        return packed, self._noted(torch.tensor(sizes), sizes)

    def _pad(
        self, data: torch.Tensor, sizes: list[int], batch_first: bool, value: float, total: int
    ) -> Any:
        """Return the padded sequences and their lengths."""
        rows = [
            torch.nn.functional.pad(
                row, [0, 0] * (row.ndim - 1) + [0, sizes[0] - len(row)], value=value
            )
            for row in data.split(sizes)
        ]
        rows += [torch.full_like(rows[0], value)] * (total - len(sizes))
        lengths = [sum(size > place for size in sizes) for place in range(sizes[0])]
        return torch.stack(rows, int(batch_first)), self._noted(torch.tensor(lengths), lengths)


class Lengths:
    """The lengths of padded sequences, and the order of their steps: times before batch.

    Parameters
    ----------
    value : torch.Tensor
        The lengths, of int64. Of those above the number of steps, that number counts.
    steps, batch : int or torch.SymInt
        The extents of the sequences.
    """

    has_one_length = False

    def __init__(self, value: torch.Tensor, steps: int, batch: int):
        self.value, self.total, self.batch = value, steps, batch
        self._ends = value.clamp(0, steps).reshape(1, batch, 1)
        self._times = torch.arange(steps).reshape(steps, 1, 1)

    def masked(self, data: torch.Tensor, value: float = 0.0) -> torch.Tensor:
        """Return data with a value after the ends of the sequences."""
        return torch.where(self._times < self._ends, data, value)

    def steps(self, data: torch.Tensor, reverse: bool) -> torch.Tensor:
        """Return the steps in the order of a direction, and 0 after the ends."""
        return self.masked(self.back(data, reverse))

    def back(self, states: torch.Tensor, reverse: bool) -> torch.Tensor:
        """Return the states of :meth:`steps` in the order of the data."""
        if not reverse:
            return states
        turned = self._ends - 1 - self._times
        places = torch.where(turned < 0, self._times, turned)
        return states.gather(0, places.expand(states.shape))

    def last(self, states: torch.Tensor) -> torch.Tensor:
        """Return the states after the last step of each sequence."""
        places = (self._ends - 1).clamp(min=0).expand(1, self.batch, states.shape[-1])
        return states.gather(0, places)[0]


def _padded(
    data: torch.Tensor, lengths: Lengths, batch_first: bool, value: float, total: int
) -> Any:
    """Return padded sequences and their lengths."""
    if total < lengths.total:
        raise NotImplementedError(
            "pad_packed_sequence needs total_length, at least the number of steps before "
            f"pack_padded_sequence, {lengths.total}: the largest length is known at run time only"
        )
    data = lengths.masked(data, value)
    more = total - lengths.total
    data = torch.cat([data, data.new_full((more, *data.shape[1:]), value)]) if more else data
    return data.transpose(0, 1) if batch_first else data, lengths.value


def _are_numbers(value: object) -> bool:
    return (
        isinstance(value, (list, tuple))
        and bool(value)
        and all(type(length) is int for length in value)
    )
