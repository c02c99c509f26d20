"""Gathers and scatters."""

from __future__ import annotations

import torch
from torch.nn import functional as F
from tvm import relax
from tvm.relax.op import grad

from ._form import Row, integers

aten = torch.ops.aten

_WORDS, _WIDTH, _TOKENS = 30000, 768, 4096
_DATA, _PICKED = (4096, 1024), (1024, 1024)


ROWS = [
    Row(
        "memory",
        "embedding 30000x768, 4x256",
        [(_WORDS, _WIDTH), integers(_WORDS, 4, 256)],
        lambda _, table, tokens: relax.op.take(table, tokens, axis=0, mode="fast"),
        lambda table, tokens: F.embedding(tokens, table),
    ),
    Row(
        "memory",
        "embedding, gradient 30000x768, 4096",
        [(_TOKENS, _WIDTH), (_WORDS, _WIDTH), integers(_WORDS, _TOKENS)],
        lambda _, dy, table, tokens: grad.take_backward(dy, table, tokens, axis=0),
        lambda dy, table, tokens: aten.embedding_dense_backward(dy, tokens, _WORDS, -1, False),
    ),
    Row(
        "memory",
        "scatter_elements, add 4096x1024, 1024 rows",
        [_DATA, integers(_DATA[0], *_PICKED), _PICKED],
        lambda _, data, places, values: relax.op.scatter_elements(data, places, values, 0, "add"),
        lambda data, places, values: torch.scatter_add(data, 0, places, values),
    ),
    Row(
        "memory",
        "gather_elements 4096x1024, 1024 rows",
        [_DATA, integers(_DATA[0], *_PICKED)],
        lambda _, data, places: relax.op.gather_elements(data, places, 0),
        lambda data, places: torch.gather(data, 0, places),
    ),
    Row(
        "memory",
        "gather_elements, gradient 4096x1024, 1024 rows",
        [_PICKED, integers(_DATA[0], *_PICKED)],
        lambda _, dy, places: grad.gather_elements_backward_data(dy, _DATA, places, 0),
        lambda dy, places: torch.zeros(_DATA).scatter_add_(0, places, dy),
    ),
]
