"""Integers in tensors without axes as indices."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the package torch is not installed: extra torch")

from torch_models import Of, check, set_seeds  # noqa: E402

from relax_grad.errors import UnsupportedOperatorError  # noqa: E402
from relax_grad.frontend.torch import from_module  # noqa: E402


class Queue(torch.nn.Module):
    """Writes rows, columns and elements at a place that is a buffer."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3))
        self.register_buffer("rows", torch.randn(4, 3))
        self.register_buffer("place", torch.tensor(2))

    def forward(self, x):
        y = x.new_zeros(4, 3, 3)
        last, self.place = self.place, (self.place + 1) % 4
        self.rows[last] = x.detach().mean(0)
        self.rows[1:, last % 3] = 1.5
        self.rows[last - 4, 1] = x.detach()[0, 0]
        y[last] = x[:3] * self.weight
        y[None, ..., last % 3] = x[:, :3].mean()
        y[0, :, last % 3] = self.weight
        y[:, last % 3, last % 2] = x[:, 0]
        return ((y + self.rows[:, None]) * self.weight).sin().sum()


def test_writes():
    set_seeds()
    check(Queue(), (torch.randn(4, 3),), steps=5)


def _read(module, x):
    return x[x.detach().sum(1).argmax()].sum() * module.scale.sum()


def _mixed(module, x):
    y = x.clone()
    y[x.detach().sum(1).argmax(), [0, 1]] = 1.0
    return (y * module.scale).sum()


@pytest.mark.parametrize(
    ("function", "message"),
    [(_read, r"use tensor\[index.reshape\(1\)\].squeeze\(0\), a copy"), (_mixed, "_mixed: y")],
)
def test_refused(function, message):
    with pytest.raises(UnsupportedOperatorError, match=message):
        from_module(Of(function), (torch.randn(3, 4),))
