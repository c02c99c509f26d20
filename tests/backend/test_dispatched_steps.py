"""Whole training steps with PyTorch's operators: the results of the compiled step."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from programs import flat, to_numpy
from tvm import relax

import relax_grad
from relax_grad.backend import DispatchLibrary

torch = pytest.importorskip("torch", reason="PyTorch is not installed: there is no library")
from torch_dispatched import NETWORKS, WANTED, step_of  # noqa: E402


def results(step, module, batch):
    """Return all results of one step."""
    machine = relax.VirtualMachine(
        tvm.compile(module, relax_grad.target.host(), relax_pipeline="relax_grad"), tvm.cpu()
    )
    numbers = [np.array(value, "float64") for value in step.hyperparameters.values()]
    scalars = map(tvm.runtime.tensor, (*batch, *numbers, np.array(0, "int64")))
    groups = [list(group.values()) for group in step.initial()]
    return flat(to_numpy(machine["step"](*scalars, *groups)))


@pytest.mark.parametrize(
    "name",
    [name if name in WANTED else pytest.param(name, marks=pytest.mark.slow) for name in NETWORKS],
)
def test_steps_have_the_same_results(name):
    step, batch = step_of(name)
    module = tvm.IRModule({"step": step.module["step"]})
    dispatched = DispatchLibrary()(module)
    script = dispatched.script()
    for function in WANTED.get(name, {"matmul"} if "vision" in name else {"nn.conv2d"}):
        assert f'torch.{function}"' in script, function
    for operator in ("nn.conv2d", "matmul", "nn.batch_norm", "grad.batch_norm_backward_data"):
        assert f"R.{operator}(" not in script
    wanted, own = (results(step, each, batch) for each in (module, dispatched))
    for result, expected in zip(own, wanted, strict=True):
        largest = np.abs(expected).max(initial=1e-3)
        np.testing.assert_allclose(result, expected, 1e-3, 1e-3 * largest)
