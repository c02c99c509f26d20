"""Recurrent layers with the product of their inputs, without and with their gradients."""

from __future__ import annotations

import numpy as np
import torch
from tvm import relax
from tvm.relax.op import grad as backward

from ._form import Input, Row, normal, with_gradients

#: The steps, the batch, the number of inputs and the number of units.
_SIZES = [(32, 32, 128, 256), (128, 16, 64, 128)]


def _scaled(rows: int, columns: int, units: int) -> Input:
    """Return a weight as large as PyTorch's initial ones: the layer does not amplify errors."""
    return lambda rng, _: normal(rng, (rows, columns)) / np.float32(2 * units**0.5)


def _rows(steps: int, batch: int, inputs: int, size: int) -> list[Row]:
    def in_relax(bb, data, own, weight, hidden, cell):
        turned = relax.op.permute_dims(own, [1, 0])
        states = bb.emit(backward.lstm(relax.op.matmul(data, turned), hidden, cell, weight))
        return relax.TupleGetItem(states, 0)

    def in_torch(data, own, weight, hidden, cell):
        state = hidden.unsqueeze(0), cell.unsqueeze(0)
        return torch.lstm(data, state, [own, weight], False, 1, 0.0, True, False, False)[0]

    name = f"{steps}x{batch}x{inputs} -> {size}"
    weights = [_scaled(4 * size, columns, size) for columns in (inputs, size)]
    arguments = [(steps, batch, inputs), *weights, (batch, size), (batch, size)]
    return [
        Row("matmul", f"LSTM {name}", arguments, in_relax, in_torch),
        Row(
            "matmul",
            f"LSTM and gradients {name}",
            [*arguments, (steps, batch, size)],
            in_relax,
            with_gradients(in_torch, 0, 1, 2, 3, 4),
            wrt=(0, 1, 2, 3, 4),
            keeps_result=True,
        ),
    ]


ROWS = [row for sizes in _SIZES for row in _rows(*sizes)]
