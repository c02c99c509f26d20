"""Softmax, log_softmax, and cross-entropy without and with its gradient."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional as F
from tvm import relax
from tvm.relax.op import grad

from ._form import Row, derived, integers, with_gradients

aten = torch.ops.aten

_SCORES, _LOGITS = (48, 256, 256), (1024, 50257)


def _softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def _log_softmax(x: np.ndarray) -> np.ndarray:
    shifted = x - x.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def _cross_entropy(bb, logits, labels):
    return relax.op.nn.nll_loss(bb.emit(relax.op.nn.log_softmax(logits)), labels)


def _cross_entropies(rows: int, classes: int) -> list[Row]:
    inputs = [(rows, classes), integers(classes, rows)]
    return [
        Row("memory", f"cross-entropy {rows}x{classes}", inputs, _cross_entropy, F.cross_entropy),
        Row(
            "memory",
            f"cross-entropy and gradient {rows}x{classes}",
            [*inputs, ()],
            _cross_entropy,
            with_gradients(F.cross_entropy, 0),
            wrt=(0,),
            keeps_result=True,
        ),
    ]


ROWS = [
    Row(
        "memory",
        "softmax 48x256x256",
        [_SCORES],
        lambda _, x: relax.op.nn.softmax(x),
        lambda x: torch.softmax(x, -1),
    ),
    Row(
        "memory",
        "softmax, gradient 48x256x256",
        [_SCORES, derived(_softmax)],
        lambda _, dy, y: grad.softmax_backward(dy, y),
        lambda dy, y: aten._softmax_backward_data(dy, y, -1, torch.float32),
    ),
    Row(
        "memory",
        "log_softmax 1024x50257",
        [_LOGITS],
        lambda _, x: relax.op.nn.log_softmax(x),
        lambda x: torch.log_softmax(x, -1),
    ),
    Row(
        "memory",
        "log_softmax, gradient 1024x50257",
        [_LOGITS, derived(_log_softmax)],
        lambda _, dy, y: grad.log_softmax_backward(dy, y),
        lambda dy, y: aten._log_softmax_backward_data(dy, y, -1, torch.float32),
    ),
    *_cross_entropies(1024, 50257),
    *_cross_entropies(64, 10),
]
