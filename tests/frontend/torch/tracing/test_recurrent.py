"""Recurrent networks of PyTorch as operators of whole layers, against PyTorch."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the package torch is not installed: extra torch")

from torch_models import check, close, compiled, operators  # noqa: E402

from relax_grad.frontend.torch import from_module  # noqa: E402

nn = torch.nn


class Networks(nn.Module):
    """Networks of each kind on one input, with all results in the loss."""

    def __init__(self, batch_first=False):
        super().__init__()
        options = {"batch_first": batch_first}
        self.lstm = nn.LSTM(3, 4, 2, bidirectional=True, **options)
        self.gru = nn.GRU(3, 5, bidirectional=True, bias=False, **options)
        self.biased = nn.GRU(3, 2, 2, **options)
        self.tanh = nn.RNN(3, 3, **options)
        self.relu = nn.RNN(3, 4, bidirectional=True, nonlinearity="relu", **options)

    def forward(self, data, initial):
        total = 0.0
        for net in (self.lstm, self.gru, self.biased, self.tanh, self.relu):
            states = () if net is not self.biased else (initial,)
            out, last = net(data, *states)
            total = total + (out**2).mean()
            for state in last if isinstance(last, tuple) else (last,):
                total = total + (state**3).mean()
        return total


RECURRENCES = {f"relax.grad.{name}" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")}


def test_layers_are_operators():
    torch.manual_seed(0)
    imported = check(
        Networks(batch_first=True),
        (torch.randn(2, 4, 3), torch.randn(2, 2, 2)),
        forward=False,
    )
    assert operators(imported) >= RECURRENCES
    assert "relax.tanh" not in operators(imported)


def test_symbolic_steps_and_batch():
    torch.manual_seed(1)
    module = Networks()
    axes = {"data": {0: "steps", 1: "batch"}, "initial": {1: "batch"}}
    imported = from_module(
        module, (torch.randn(4, 3, 3), torch.randn(2, 3, 2)), dynamic_shapes=axes
    )
    assert operators(imported) >= RECURRENCES
    run = compiled(imported, forward=False)
    values = list(module.parameters())
    for steps, batch in ((4, 3), (1, 1), (9, 2)):
        data, initial = torch.randn(steps, batch, 3), torch.randn(2, batch, 2)
        wanted = module(data, initial)
        (loss, *_), grads = run("loss_adjoint", torch.tensor(0), data, initial, *values)
        close("loss", [loss], [wanted])
        close("gradients", grads, torch.autograd.grad(wanted, values))


def test_projections_of_symbolic_steps_and_batch():
    """The recurrence of a layer with a projection is that of the states before the projection."""
    torch.manual_seed(2)

    class Projected(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.LSTM(3, 4, 2, proj_size=2, bidirectional=True)
            self.plain = nn.LSTM(3, 5, proj_size=1, bias=False)

        def forward(self, data, first, cell):
            out, (hidden, last) = self.net(data, (first, cell))
            other, (end, _) = self.plain(data)
            total = (out**2).mean() + hidden.mean() + (last**2).mean()
            return total + (other**3).mean() + end.mean()

    module = Projected()
    axes = {"data": {0: "steps", 1: "batch"}, "first": {1: "batch"}, "cell": {1: "batch"}}
    inputs = torch.randn(4, 3, 3), torch.randn(4, 3, 2), torch.randn(4, 3, 4)
    imported = from_module(module, inputs, dynamic_shapes=axes)
    assert "relax.grad.lstm" in operators(imported)
    assert "relax.tanh" not in operators(imported)
    run, values = compiled(imported, forward=False), list(module.parameters())
    for steps, batch in ((4, 3), (1, 1), (6, 2)):
        inputs = (torch.randn(steps, batch, 3), *(torch.randn(4, batch, n) for n in (2, 4)))
        wanted = module(*inputs)
        (loss, *_), grads = run("loss_adjoint", torch.tensor(0), *inputs, *values)
        close("loss", [loss], [wanted])
        close("gradients", grads, torch.autograd.grad(wanted, values))
