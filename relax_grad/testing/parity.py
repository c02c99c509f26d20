"""Comparison with PyTorch's autograd, where PyTorch is installed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..errors import GradientCheckError
from . import _program
from .check import resolve, select_wrt


def check_against_torch(
    fn_or_op: str | Callable,
    inputs: Sequence,
    torch_function: Callable,
    *,
    wrt: Sequence[int | str] | None = None,
    target="llvm",
    rtol: float = 1e-7,
    seed: int = 0,
    **attrs,
) -> float:
    """Compare values and gradients with those of the same function in PyTorch, in float64.

    Parameters
    ----------
    fn_or_op, inputs, wrt, target, seed, **attrs
        As for :func:`relax_grad.testing.check_gradients`.
    torch_function : Callable
        Takes the module ``torch`` and then a tensor for each array among the inputs (a tuple of tensors
        for a tuple), and returns a tensor or a tuple of tensors.
    rtol : float
        The largest error that is accepted, relative to the largest element compared with.

    Returns
    -------
    max_error : float
        The largest error found.

    Raises
    ------
    GradientCheckError
        Names the operator, the argument, the worst element and both numbers.
    """
    import torch

    name, function = resolve(fn_or_op)
    arguments = _program.make_arguments(inputs, "float64", {})
    rng = np.random.default_rng(seed)
    program = _program.first_order(function, arguments, attrs, rng)
    names = select_wrt(program.arguments, wrt)
    differentiated = _program.differentiate(program, names)
    loss, found = _program.compile_module(differentiated, target)("main_adjoint", program.values())

    leaves = {}

    def to_torch(argument):
        if isinstance(argument, tuple):
            return tuple(to_torch(item) for item in argument)
        tensor = torch.from_numpy(argument.value.copy())
        leaves[argument.name] = tensor.requires_grad_() if argument.is_float else tensor
        return tensor

    tensors = [to_torch(a) for a in arguments if isinstance(a, (tuple, _program.Argument))]
    outputs = torch_function(torch, *tensors)
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    cotangents = [a for a in program.arguments if a.name.startswith("cotangent")]
    for i, (output, cotangent) in enumerate(zip(outputs, cotangents, strict=True)):
        if tuple(output.shape) != cotangent.value.shape:
            raise GradientCheckError(
                f"{name}: output {i} has the shape {cotangent.value.shape}, but PyTorch's has the "
                f"shape {tuple(output.shape)}"
            )
    total = sum(
        (output * torch.from_numpy(cotangent.value)).sum()
        for output, cotangent in zip(outputs, cotangents, strict=True)
    )
    wanted = torch.autograd.grad(total, [leaves[n] for n in names], materialize_grads=True)
    largest = _compare(name, "the result", loss, total.detach().numpy(), rtol)
    for argument, gradient, expected in zip(names, found, wanted, strict=True):
        what = f"the gradient of {argument}"
        largest = max(largest, _compare(name, what, gradient, expected.numpy(), rtol))
    return largest


def _compare(name, what, found, expected, rtol) -> float:
    if not expected.size:
        return 0.0
    same = (found == expected) | (np.isnan(found) & np.isnan(expected))
    with np.errstate(invalid="ignore"):  # infinities of one sign are the same
        error = np.where(same, 0.0, np.abs(found - expected))
    scale = max(1.0, np.abs(expected[np.isfinite(expected)]).max(initial=0.0))
    if not np.all(error <= rtol * scale):
        worst = np.unravel_index(np.argmax(np.nan_to_num(error, nan=np.inf)), error.shape)
        at = ", ".join(str(int(i)) for i in worst)
        raise GradientCheckError(
            f"{name}: {what} differs from PyTorch's; the worst element is [{at}], which is "
            f"{found[worst]:.9g}, but PyTorch gives {expected[worst]:.9g}"
        )
    return float(error.max()) / scale
