"""Packed sequences with lengths that are numbers: every recurrent network, sorted and not."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the package torch is not installed: extra torch")

from torch_models import check, operators, set_seeds  # noqa: E402

nn = torch.nn
rnn = nn.utils.rnn


class Packed(nn.Module):
    """Recurrent networks over packed sequences, whose lengths are a list or a tensor of numbers."""

    def __init__(self, batch_first: bool, lengths):
        super().__init__()
        self.batch_first, self.lengths = batch_first, lengths
        options = {"batch_first": batch_first}
        self.layers = nn.ModuleList([nn.LSTM(3, 4, 2, bidirectional=True, proj_size=3, **options)])
        if batch_first:
            self.layers.append(nn.GRU(6, 6, bias=False, **options))
            self.layers.append(nn.RNN(6, 3, nonlinearity="relu", bidirectional=True, **options))
        self.layers.append(nn.RNN(6, 2, **options))

    def forward(self, x):
        data = rnn.pack_padded_sequence(x, self.lengths, self.batch_first, enforce_sorted=False)
        states = []
        for layer in self.layers:
            data, state = layer(data)
            states += state if isinstance(state, tuple) else [state]
        out, lengths = rnn.pad_packed_sequence(data, self.batch_first, -2.0, total_length=6)
        return out.square().sum() + sum(each.sum() for each in states), out, lengths


@pytest.mark.parametrize("batch_first", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_packed_sequences(batch_first):
    set_seeds()
    x = torch.randn(4, 5, 3, dtype=torch.float64)
    x = x if batch_first else x.transpose(0, 1).contiguous()
    imported = check(Packed(batch_first, [2, 5, 1, 4]).double(), (x,))
    layers = {"lstm", "gru", "rnn_relu", "rnn_tanh"} if batch_first else {"lstm", "rnn_tanh"}
    assert operators(imported) >= {f"relax.grad.{name}" for name in layers}
    assert not operators(imported) & {"relax.tanh", "relax.sigmoid"}
