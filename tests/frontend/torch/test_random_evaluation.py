"""Imported modules in evaluation: they draw from a seed, or draw nothing."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the package torch is not installed: extra torch")

import tvm  # noqa: E402
from sweep import TARGET  # noqa: E402
from tvm import relax  # noqa: E402

from relax_grad.frontend.torch import from_module  # noqa: E402

nn = torch.nn


def test_evaluation_draws_nothing():
    imported = from_module(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), (torch.randn(2, 4),))
    text = imported.module["forward"].script()
    assert "call_tir" not in text
    assert "where" not in text


@pytest.mark.filterwarnings("error")
def test_evaluation_that_draws_takes_a_seed():
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.dense, self.dropout = nn.Linear(3, 4), nn.Dropout(0.5)

        def forward(self, x):
            mean, deviation = self.dropout(self.dense(x)).chunk(2, 1)
            noise = torch.randn_like(mean)
            return mean + noise * deviation.exp(), noise

    module, x = Encoder(), torch.randn(5, 3)
    imported = from_module(module, (x,))
    function = imported.module["forward"]
    assert [param.name for param in function.params][:2] == ["seed", "x"]
    assert int(function.attrs["num_input"]) == 2
    machine = relax.VirtualMachine(tvm.compile(imported.module, TARGET), tvm.cpu())

    def run(seed):
        arguments = [tvm.runtime.tensor(np.array(seed, "int64")), tvm.runtime.from_dlpack(x)]
        outputs = machine["forward"](*arguments, *imported.values)
        return [torch.from_dlpack(output).clone() for output in outputs]

    result, noise = run(3)
    mean, deviation = module.dense(x).chunk(2, 1)
    torch.testing.assert_close(result, (mean + noise * deviation.exp()).detach())
    assert torch.equal(run(3)[1], noise)
    assert not torch.equal(run(4)[1], noise)


def test_evaluation_without_random_numbers_takes_no_seed():
    imported = from_module(nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5)), (torch.randn(2, 3),))
    assert imported.module["forward"].params[0].name == "input"
    assert imported.module["training"].params[0].name == "seed"
