"""Packed sequences whose lengths are numbers at the trace.

PyTorch's operators of packed sequences read the lengths from tensors, which have no values in a
trace. A trace knows the lengths that the module makes from numbers, and the operators on them are
replaced with others of known extents.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

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

    def replacement(self, function: Callable, args: Sequence) -> Callable:
        """Return the function to call in the place of one of PyTorch."""
        name = getattr(function, "__name__", "")
        if name in ("tensor", "as_tensor") and _are_numbers(args[0]):
            return lambda data, **options: self._noted(function(data, **options), list(data))
        if name in ("to", "cpu", "long", "sort", "__getitem__") and self._numbers(args[0]):
            numbers = self._numbers(args[0])
            if name == "__getitem__":
                return (lambda _, place: numbers[place]) if type(args[1]) is int else function
            if name == "sort":
                return lambda *rest, **options: self._sorted(function, numbers, rest, options)
            return lambda *rest, **options: self._noted(function(*rest, **options), numbers)
        sizes = self._numbers(args[1]) if len(args) > 1 else None
        if sizes is None:
            return function
        if name in _RECURRENT:
            return lambda data, _, *rest: _RECURRENT[name](data, sizes, *rest)
        if name == "_pack_padded_sequence":
            return lambda data, _, batch_first: self._pack(data, sizes, batch_first)
        if name == "_pad_packed_sequence":
            return lambda data, _, *rest: self._pad(data, sizes, *rest)
        return function

    def _numbers(self, value) -> list[int] | None:
        packed = self._known.get(id(value))
        return packed[1] if packed else None

    def _noted(self, tensor: torch.Tensor, numbers: list[int]) -> torch.Tensor:
        self._known[id(tensor)] = tensor, numbers  # the tensor keeps its identity
        return tensor

    def _sorted(self, function: Callable, numbers: list[int], args, options):
        packed = function(*args, **options)
        self._noted(packed[0], sorted(numbers, reverse=options.get("descending", False)))
        return packed

    def _pack(self, data: torch.Tensor, lengths: list[int], batch_first: bool):
        """Return the valid elements, time by time, and the number of those of each time."""
        data = data.transpose(0, 1) if batch_first else data
        if any(length < other for length, other in itertools.pairwise(lengths)):
            raise ValueError(
                "the lengths must descend; give pack_padded_sequence enforce_sorted=False"
            )
        sizes = [sum(length > time for length in lengths) for time in range(lengths[0])]
        packed = torch.cat([data[time, :size] for time, size in enumerate(sizes)])
        return packed, self._noted(torch.tensor(sizes), sizes)

    def _pad(self, data, sizes: list[int], batch_first: bool, value: float, total: int):
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


def _are_numbers(value) -> bool:
    return (
        isinstance(value, (list, tuple))
        and bool(value)
        and all(type(length) is int for length in value)
    )
