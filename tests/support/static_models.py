"""The model of the tests of steps without a runtime, and its batches."""

from __future__ import annotations

import numpy as np
import pytest

from relax_grad.training import AdamW, train_step

ROWS = 6


def digits_step():
    """Return the step of a CNN with batch norm, dropout, AdamW and a moving average."""
    torch = pytest.importorskip("torch")
    from torch import nn

    from relax_grad.frontend.torch import from_module

    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(64, 10),
    )
    imported = from_module(
        network,
        (torch.zeros(ROWS, 1, 8, 8),),
        loss=nn.functional.cross_entropy,
        targets=(torch.zeros(ROWS, dtype=torch.int64),),
    )
    return train_step(imported, AdamW(3e-3, weight_decay=0.01), ema=0.9)


def batches(count, seed=0):
    rng = np.random.default_rng(seed)
    return [
        {
            "input": rng.random((ROWS, 1, 8, 8), "float32"),
            "target": rng.integers(0, 10, ROWS),
        }
        for _ in range(count)
    ]
