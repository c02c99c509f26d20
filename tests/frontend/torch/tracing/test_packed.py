"""Packed sequences of lengths that are numbers, and of lengths that are an input: every recurrent
network, sorted and not."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the package torch is not installed: extra torch")

import tvm  # noqa: E402
from sweep import TARGET  # noqa: E402
from torch_models import check, operators, set_seeds, skip_without_half_lstm  # noqa: E402

from relax_grad.frontend.torch import from_module  # noqa: E402

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

    def forward(self, x, lengths=None):
        numbers = self.lengths if lengths is None else lengths
        data = rnn.pack_padded_sequence(x, numbers, self.batch_first, enforce_sorted=False)
        states = []
        for layer in self.layers:
            data, state = layer(data)
            states += state if isinstance(state, tuple) else [state]
        out, lengths = rnn.pad_packed_sequence(data, self.batch_first, -2.0, total_length=6)
        return out.square().sum() + sum(final.sum() for final in states), out, lengths


@pytest.mark.parametrize("batch_first", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_packed_sequences(batch_first):
    set_seeds()
    x = torch.randn(4, 5, 3, dtype=torch.float64)
    x = x if batch_first else x.transpose(0, 1).contiguous()
    imported = check(Packed(batch_first, [2, 5, 1, 4]).double(), (x,))
    layers = {"lstm", "gru", "rnn_relu", "rnn_tanh"} if batch_first else {"lstm", "rnn_tanh"}
    assert operators(imported) >= {f"relax.grad.{name}" for name in layers}
    assert not operators(imported) & {"relax.tanh", "relax.sigmoid"}


@pytest.mark.parametrize("batch_first", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_lengths_that_are_an_input(batch_first):
    """What is after the ends of sequences, here NaN, has no effect."""
    set_seeds()
    x = torch.randn(4, 5, 3, dtype=torch.float64)
    lengths = torch.tensor([2, 5, 1, 4])
    for row, length in zip(x, lengths, strict=True):
        row[length:] = torch.nan
    x = x if batch_first else x.transpose(0, 1).contiguous()
    imported = check(Packed(batch_first, None).double(), (x, lengths))
    layers = {"lstm", "gru", "rnn_relu", "rnn_tanh"} if batch_first else {"lstm", "rnn_tanh"}
    assert operators(imported) >= {f"relax.grad.{name}" for name in layers}
    assert not operators(imported) & {"relax.tanh", "relax.sigmoid"}


class Bidirectional(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(3, 4, 2, batch_first=True, bidirectional=True)

    def forward(self, x, lengths):
        data = rnn.pack_padded_sequence(x, lengths.cpu(), True, enforce_sorted=False)
        data, states = self.layer(data)
        return rnn.pad_packed_sequence(data, True, total_length=x.shape[1])[0], *states


def test_lengths_that_are_no_example():
    """Symbolic batch and steps, with other lengths than those of the trace."""
    set_seeds()
    module = Bidirectional()
    batch, steps = torch.export.Dim("batch"), torch.export.Dim("steps")
    shapes = {"x": {0: batch, 1: steps}, "lengths": {0: batch}}
    inputs = torch.randn(3, 6, 3), torch.tensor([4, 6, 2])
    imported = from_module(module, inputs, dynamic_shapes=shapes)
    executable = tvm.compile(imported.module, TARGET, relax_pipeline="relax_grad")
    run = tvm.relax.VirtualMachine(executable, tvm.cpu())["forward"]
    params = [tvm.runtime.from_dlpack(param.detach()) for param in module.parameters()]
    for extents, lengths in (((4, 9, 3), [9, 2, 7, 1]), ((2, 5, 3), [3, 4])):
        x, lengths = torch.randn(extents), torch.tensor(lengths)
        results = run(*map(tvm.runtime.from_dlpack, (x, lengths)), *params)
        for result, other in zip(results, module(x, lengths), strict=True):
            torch.testing.assert_close(torch.from_dlpack(result), other.detach())


class Autocast(nn.Module):
    """Packed sequences under autocast, of known lengths and of lengths at run time."""

    def __init__(self):
        super().__init__()
        self.lstm, self.gru = nn.LSTM(3, 4), nn.GRU(3, 4)

    def forward(self, x, lengths):
        results = []
        with torch.autocast("cpu", torch.bfloat16):
            for numbers in (lengths, [5, 2, 3], [4, 4, 4]):
                packed = rnn.pack_padded_sequence(x, numbers, enforce_sorted=False)
                for layer in (self.lstm, self.gru):
                    out, state = layer(packed)
                    results.append(rnn.pad_packed_sequence(out, total_length=6)[0])
                    results += state if isinstance(state, tuple) else [state]
        return sum(result.float().square().mean() for result in results), *results


@pytest.mark.slow
def test_autocast():
    """The results have PyTorch's dtypes: of autocast for an LSTM of sequences of one length."""
    skip_without_half_lstm()
    set_seeds()
    inputs = torch.randn(6, 3, 3), torch.tensor([2, 5, 4])
    imported = check(Autocast(), inputs, forward=False, tolerance=6e-2)
    assert not operators(imported) & {"relax.tanh", "relax.sigmoid"}


class Short(nn.Module):
    """A packed sequence of lengths at run time, and a function of it."""

    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.GRU(3, 3), function

    def forward(self, x, lengths):
        return self.function(self.layer(rnn.pack_padded_sequence(x, lengths))[0])


@pytest.mark.parametrize(
    ("function", "match"),
    [
        (lambda data: rnn.pad_packed_sequence(data)[0], "needs total_length, at least the number"),
        (lambda data: rnn.pad_packed_sequence(data, total_length=3)[0], "needs total_length"),
        (lambda data: data.data.square().sum(), "square reads a packed sequence whose lengths"),
        (lambda data: data.batch_sizes.sum(), "sum reads a packed sequence whose lengths"),
    ],
)
def test_other_uses_of_lengths_at_run_time_are_refused(function, match):
    with pytest.raises(Exception, match=match):
        from_module(Short(function), (torch.randn(4, 2, 3), torch.tensor([4, 2])))
