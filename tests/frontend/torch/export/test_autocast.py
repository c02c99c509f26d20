"""Exported programs of modules with autocast: results, dtypes and gradients of PyTorch."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the package torch is not installed: extra torch")

from torch_models import close, compiled, operators  # noqa: E402

from relax_grad.frontend.torch import from_exported_program, from_module  # noqa: E402

nn, F = torch.nn, torch.nn.functional

#: The relative errors of results and gradients.
TOLERANCE = {torch.bfloat16: (2e-2, 4e-2), torch.float16: (4e-3, 8e-3)}


class Program(nn.Module):
    """Layers of float32 under autocast, and all their results."""

    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        networks = {
            "projected": nn.LSTM(8, 5, proj_size=2, bias=False),
            "gru": nn.GRU(8, 4),
            "tanh": nn.RNN(8, 3, batch_first=True),
        }
        if dtype is torch.bfloat16:  # PyTorch has no LSTM of float16 on CPUs
            networks["lstm"] = nn.LSTM(8, 4)
        self.networks = nn.ModuleDict(networks)
        self.cells = nn.ModuleList([nn.LSTMCell(8, 4), nn.RNNCell(8, 4)])

    def forward(self, data):
        results = []
        with torch.autocast("cpu", self.dtype):
            values = self.conv(data.transpose(1, 2)).transpose(1, 2)
            values = self.attention(values, values, values, need_weights=False)[0]
            results += [values, torch.einsum("bth,bsh->bts", values, data)]
            results += [torch.einsum("bth,bth->bt", data, values.float())]
            for net in self.networks.values():
                out, last = net(values)
                results += [out, *(last if isinstance(last, tuple) else (last,))]
            for cell in self.cells:
                state = cell(data[:, 0], cell(values[:, 1]))
                results += state if isinstance(state, tuple) else [state]
            places = torch.zeros(data.shape[0], dtype=torch.int64)
            results += [F.nll_loss(values[:, 0].log_softmax(-1), places)]
        # Without a copy, the export returns the casts of results of float32.
        return sum(
            (result.to(torch.float32, copy=True) ** 2).mean() for result in results
        ), *results


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]
)
def test_programs_have_the_results_and_gradients_of_pytorch(dtype):
    torch.manual_seed(0)
    module, data = Program(dtype), torch.randn(3, 5, 8)
    imported = from_exported_program(torch.export.export(module, (data,)))
    assert operators(imported) >= {f"relax.grad.{name}" for name in ("lstm", "gru", "rnn_tanh")}
    run, values = compiled(imported, forward=False), list(module.parameters())
    error, error_of_gradients = TOLERANCE[dtype]
    wanted, *outputs = module(data)
    (loss, results, _), grads = run("loss_adjoint", torch.tensor(0), data, *values)
    close("loss", [loss], [wanted], error)
    close("output", results[1:], outputs, error)
    close("gradients", grads, torch.autograd.grad(wanted, values), error_of_gradients)


class Composite(nn.Module):
    """Composite operators on operands of two dtypes under autocast, which casts below them."""

    def forward(self, x, weight):
        with torch.autocast("cpu", torch.bfloat16):
            y = x @ weight
            results = [torch.einsum("bh,sh->bs", y, x), torch.einsum("bh,bh->b", x, x)]
            results += [torch.linalg.matrix_power(weight, 3), torch.inner(y, y)]
            with torch.autocast("cpu", enabled=False):
                results += [torch.einsum("bh,sh->bs", x, x)]
        return results


@pytest.mark.parametrize("imports", [from_module, from_exported_program])
def test_composite_operators_have_the_dtypes_of_pytorch(imports):
    module, args = Composite(), (torch.ones(2, 3), torch.ones(3, 3))
    if imports is from_module:
        imported = from_module(module, args)
    else:
        imported = from_exported_program(torch.export.export(module, args))
    results = imported.module["training"].ret_ty.fields[0].fields
    dtypes = [str(result.dtype.dtype) for result in results]
    assert dtypes == [str(result.dtype).removeprefix("torch.") for result in module(*args)]
