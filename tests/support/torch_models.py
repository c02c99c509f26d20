"""PyTorch models imported and trained beside PyTorch itself, in the same process and from the same
values."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
import tvm
from torch import nn
from torch.utils import _pytree as pytree
from tvm import relax

import relax_grad
from relax_grad.frontend.torch import Imported, from_module

#: The share of the largest element of a tensor that a difference may have.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 5e-2, torch.float16: 2e-2}

RATE = 0.05


def check(
    module: nn.Module,
    args=(),
    kwargs=None,
    *,
    loss=None,
    targets=(),
    steps: int = 1,
    tolerance: float | None = None,
    forward: bool = True,
    seed: int = 0,
    replay: Sequence[str] = (),
    **options,
) -> Imported:
    """Assert that an imported module trains as in PyTorch, and return it.

    Loss, outputs, the gradient of every parameter and the new states are compared after each step
    of gradient descent. The module keeps its values.

    Parameters
    ----------
    module, args, kwargs, loss, targets
        As for :func:`relax_grad.frontend.torch.from_module`.
    steps : int
        The number of steps.
    tolerance : float, optional
        The share of the largest element of a tensor that a difference may have; by default that of
        the dtype.
    forward : bool
        Whether to compare the evaluation too.
    seed : int
        The seed of the random numbers.
    replay : Sequence[str]
        The outputs that are drawn numbers. PyTorch gets them as keyword arguments in the place of
        its own.
    **options
        As for :func:`relax_grad.frontend.torch.from_module`.
    """
    args, kwargs, targets = tuple(args), dict(kwargs or {}), tuple(targets)
    imported = from_module(module, args, kwargs, loss=loss, targets=targets, **options)
    run = compiled(imported, forward)
    module, loss = copy.deepcopy((module, loss))
    whole = nn.ModuleDict({"module": module})
    if isinstance(loss, nn.Module):
        whole["loss"] = loss
    if not module.training:
        module.train()
    feeds = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    marks = [leaf for leaf in pytree.tree_leaves(targets) if isinstance(leaf, torch.Tensor)]
    params, states = (
        {key: tensor_of(tensor) for key, tensor in group.items()}
        for group in (imported.params, imported.states)
    )
    frozen = [tensor_of(tensor) for tensor in imported.frozen.values()]
    for step in range(steps):
        values = [*params.values(), *frozen, *states.values()]
        if forward and "forward" in [
            variable.name_hint for variable in imported.module.get_global_vars()
        ]:
            output = run("forward", *feeds, *values)
            with evaluation(module), torch.no_grad():
                wanted = module(*args, **kwargs)
            close("output", output, outputs_of(wanted), tolerance)
        (value, outputs, new), gradients = run(
            "loss_adjoint", torch.tensor(seed + step), *feeds, *marks, *values
        )
        for param in whole.parameters():
            param.grad = None
        drawn = dict(zip(imported.outputs, outputs, strict=True))
        result = module(*args, **kwargs, **{key: drawn[key] for key in replay})
        wanted = loss_of(result) if loss is None else loss(result, *targets)
        wanted.backward()
        close("loss", [value], [wanted.reshape(())], tolerance)
        close("output", outputs, outputs_of(result), tolerance)
        expected = expected_values(whole, gradient=True)
        for (key, old), gradient in zip(params.items(), gradients, strict=True):
            close(f"gradient of {key} at step {step}", [gradient], [expected[key]], tolerance)
            params[key] = old - RATE * gradient
        with torch.no_grad():
            for param in whole.parameters():
                if param.requires_grad and param.grad is not None:
                    param -= RATE * param.grad
        expected = expected_values(whole, gradient=False)
        for key, param in zip(states, new, strict=True):
            close(f"state {key} at step {step}", [param], [expected[key]], tolerance)
            states[key] = param
    return imported


def compiled(imported: Imported, forward: bool = True, name: str = "loss"):
    """Return a function ``run(name, *tensors)`` of the compiled gradient function and the
    evaluation."""
    module = imported.module
    if imported.params:
        module = relax_grad.value_and_grad(module, name, wrt=list(imported.params))
    keep = {f"{name}_adjoint" if imported.params else name, *(["forward"] if forward else [])}
    functions = {
        variable: function
        for variable, function in module.functions.items()
        if variable.name_hint in keep or variable.name_hint not in ("loss", "forward")
    }
    built = tvm.compile(
        tvm.IRModule(functions), relax_grad.target.host(), relax_pipeline="relax_grad"
    )
    machine = relax.VirtualMachine(built, tvm.cpu())

    def run(function: str, *tensors):
        return torch_values(machine[function](*map(tvm_value, tensors)))

    return run


def tvm_value(tensor) -> tvm.runtime.Tensor:
    """Return a copy of a tensor for TVM."""
    return tvm.runtime.from_dlpack(tensor.detach().clone().contiguous())


def torch_values(value):
    """Return results as torch tensors in nested lists."""
    if isinstance(value, tvm.runtime.Tensor):
        return tensor_of(value)
    return [torch_values(item) for item in value]


def tensor_of(value: tvm.runtime.Tensor) -> torch.Tensor:
    """Return a copy of a TVM tensor."""
    return torch.from_dlpack(value).clone()


def loss_of(result) -> torch.Tensor:
    """Return the loss in the result of a module that computes it."""
    if isinstance(result, dict):
        return result["loss"]
    return result[0] if isinstance(result, (tuple, list)) else result


def outputs_of(result) -> list[torch.Tensor]:
    """Return the tensors of a nested result."""
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def expected_values(whole: nn.ModuleDict, gradient: bool) -> dict[str, torch.Tensor]:
    """Return the parameters' gradients or the buffers by the keys that the import gives them."""
    values = {}
    for key, tensor in (whole.named_parameters if gradient else whole.named_buffers)():
        value = (
            tensor
            if not gradient
            else torch.zeros_like(tensor)
            if tensor.grad is None
            else tensor.grad
        )
        values[key.removeprefix("module.")] = value
    return values


class evaluation:
    """Put a module into evaluation mode, and restore it and its buffers at the end."""

    def __init__(self, module: nn.Module):
        self.module = module

    def __enter__(self):
        self.flags = [(module, module.training) for module in self.module.modules()]
        self.buffers = [(module, dict(module._buffers)) for module in self.module.modules()]
        self.values = [(buffer, buffer.clone()) for buffer in self.module.buffers()]
        self.module.eval()

    def __exit__(self, *_):
        for module, flag in self.flags:
            module.training = flag
        for module, buffers in self.buffers:
            module._buffers.update(buffers)
        for buffer, value in self.values:
            buffer.copy_(value)


def close(what: str, actual, wanted, tolerance: float | None = None) -> None:
    """Assert that tensors agree in dtype, shape and values."""
    assert len(actual) == len(wanted), (
        f"{what}: {len(actual)} tensors, but PyTorch has {len(wanted)}"
    )
    for result, other in zip(actual, wanted, strict=True):
        other = other.detach()
        assert result.dtype == other.dtype, f"{what}: {result.dtype}, but PyTorch has {other.dtype}"
        assert result.shape == other.shape, f"{what}: {result.shape}, but PyTorch has {other.shape}"
        if not other.is_floating_point():
            assert torch.equal(result, other), f"{what}: {result}, but PyTorch has {other}"
            continue
        share = TOLERANCE[other.dtype] if tolerance is None else tolerance
        result, other = result.double(), other.double()
        scale = max(1e-3, float(other.abs().nan_to_num(0, 0, 0).max())) if other.numel() else 1.0
        torch.testing.assert_close(
            result,
            other,
            rtol=share,
            atol=share * scale,
            equal_nan=True,
            msg=lambda m: f"{what}: {m}",
        )


def set_seeds(seed: int = 0) -> None:
    """Seed the generators of initial values."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002  (models draw from it)
    torch.manual_seed(seed)


def operators(imported) -> set[str]:
    """Return the names of the operators of all functions of an imported model."""
    names = set()

    def visit(expr):
        if isinstance(expr, relax.Call) and hasattr(expr.op, "name"):
            names.add(expr.op.name)

    for function in imported.module.functions.values():
        if isinstance(function, relax.Function):
            relax.analysis.post_order_visit(function, visit)
    return names


def perceptron(*widths: int) -> nn.Sequential:
    """Return dense layers of these widths with GELU between them."""
    layers = []
    for width, other in itertools.pairwise(widths):
        layers += [nn.Linear(width, other), nn.GELU()]
    return nn.Sequential(*layers[:-1])


class Of(nn.Module):
    """A module of a function of the module and the inputs, with a dense layer and a buffer."""

    def __init__(self, function, width=4, **members):
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.randn(width))
        self.register_buffer("buffer", torch.randn(width))
        for name, member in members.items():
            setattr(self, name, member)
        self.function = function
        self.steps = 0

    def forward(self, x):
        return self.function(self, x)


def skip_without_half_lstm() -> None:
    """Skip a test if PyTorch has no LSTM in bfloat16: oneDNN's needs AVX-512."""
    layer = torch.nn.LSTM(3, 4)
    try:
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            layer(torch.zeros(2, 1, 3))
    except RuntimeError as error:
        if "could not create a primitive" not in str(error):
            raise
        pytest.skip("PyTorch has no LSTM in bfloat16 for this processor")
