"""Recurrent networks of PyTorch as operators of whole layers, against PyTorch."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the package torch is not installed: extra torch")

from torch_models import check, close, compiled, operators, skip_without_half_lstm  # noqa: E402

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


@pytest.mark.slow
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


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]
)
def test_half_precision(dtype):
    torch.manual_seed(3)
    module = Networks().to(dtype)
    args = torch.randn(4, 2, 3).to(dtype), torch.randn(2, 2, 2).to(dtype)
    imported = check(module, args, forward=False, tolerance=6e-2)
    assert operators(imported) >= RECURRENCES
    assert "relax.tanh" not in operators(imported)


class Autocast(nn.Module):
    """Networks of float32 under autocast, and all their results."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 4)
        self.projected = nn.LSTM(3, 5, proj_size=2, bias=False)
        self.gru = nn.GRU(3, 4)
        self.relu = nn.RNN(3, 4, nonlinearity="relu", bidirectional=True)

    def forward(self, data, initial):
        results = []
        with torch.autocast("cpu", torch.bfloat16):
            for net in (self.lstm, self.projected, self.gru, self.relu):
                out, last = net(data, *([initial] if net is self.gru else []))
                results += [out, *(last if isinstance(last, tuple) else (last,))]
        total = sum((result.float() ** 2).mean() for result in results)
        return total, *results


@pytest.mark.slow
def test_autocast_of_symbolic_steps_and_batch():
    """The results have PyTorch's dtypes: an LSTM that of autocast, a GRU that of its state."""
    skip_without_half_lstm()
    torch.manual_seed(4)
    module = Autocast()
    axes = {"data": {0: "steps", 1: "batch"}, "initial": {1: "batch"}}
    imported = from_module(
        module, (torch.randn(4, 3, 3), torch.randn(1, 3, 4)), dynamic_shapes=axes
    )
    assert operators(imported) >= RECURRENCES - {"relax.grad.rnn_tanh"}
    assert "relax.tanh" not in operators(imported)
    run, values = compiled(imported, forward=False), list(module.parameters())
    for steps, batch in ((4, 3), (7, 2)):
        data, initial = torch.randn(steps, batch, 3), torch.randn(1, batch, 4)
        wanted, *outputs = module(data, initial)
        (loss, results, _), grads = run("loss_adjoint", torch.tensor(0), data, initial, *values)
        close("loss", [loss], [wanted], 1e-2)
        close("output", results[1:], outputs, 3e-2)
        close("gradients", grads, torch.autograd.grad(wanted, values), 6e-2)


class Cells(nn.Module):
    """Two steps of cells of float32 under autocast."""

    def __init__(self):
        super().__init__()
        self.cells = nn.ModuleList(
            [
                nn.LSTMCell(3, 4),
                nn.GRUCell(3, 4, bias=False),
                nn.RNNCell(3, 4),
                nn.RNNCell(3, 4, nonlinearity="relu"),
            ]
        )

    def forward(self, x):
        results = []
        with torch.autocast("cpu", torch.bfloat16):
            for cell in self.cells:
                state = cell(x, cell(x))
                results += state if isinstance(state, tuple) else [state]
        return sum((result.float() ** 2).mean() for result in results), *results


def test_autocast_of_cells():
    torch.manual_seed(5)
    check(Cells(), (torch.randn(2, 3),), forward=False, tolerance=1e-2)
