"""Comparison with PyTorch's autograd, if PyTorch is installed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tvm

from .._validation import described
from ..errors import GradientCheckError
from . import _program
from ._arguments import check_tolerance, resolve, select_wrt
from ._compare import difference
from .check import GradientReport, check_together


@dataclass(frozen=True)
class TorchCase:
    """One call to compare with PyTorch.

    Attributes
    ----------
    fn_or_op, inputs, wrt
        As for :func:`relax_grad.testing.check_gradients`.
    torch_function : Callable
        Takes the module ``torch`` and then a tensor for each array among the inputs (a tuple of
        tensors for a tuple), and returns a tensor or a tuple of tensors.
    attrs : Mapping
        The attributes of the operator.
    symbolic : Mapping[int, Mapping[int, str]]
        As for :func:`relax_grad.testing.check_gradients`.
    """

    fn_or_op: str | Callable
    inputs: Sequence
    torch_function: Callable
    attrs: Mapping = field(default_factory=dict)
    wrt: Sequence[int | str] | None = None
    symbolic: Mapping[int, Mapping[int, str]] = field(default_factory=dict)


def check_against_torch(
    fn_or_op: str | Callable,
    inputs: Sequence,
    torch_function: Callable,
    *,
    wrt: Sequence[int | str] | None = None,
    through: str = "relax_grad",
    target: tvm.target.Target | str | Mapping | None = None,
    rtol: float = 1e-7,
    seed: int = 0,
    **attrs: object,
) -> float:
    """Compare values and gradients with the same function in PyTorch, in float64.

    Parameters
    ----------
    fn_or_op, inputs, wrt, through, target, seed, **attrs
        As for :func:`relax_grad.testing.check_gradients`.
    torch_function : Callable
        As for :class:`relax_grad.testing.TorchCase`.
    rtol : float
        The largest accepted error, relative to the largest element of PyTorch's result.

    Returns
    -------
    max_error : float
        The largest error found.

    Raises
    ------
    GradientCheckError
        If a value or gradient differs. Names the operator, the argument, the worst element and both
        numbers.
    TypeError
        If ``torch_function`` cannot be called, or returns no tensors.

    Examples
    --------
    >>> import numpy as np
    >>> from relax_grad.testing import check_against_torch
    >>> x = np.array([-1.0, 0.0, 2.0])
    >>> check_against_torch("relax.nn.relu", [x], lambda torch, x: torch.relu(x))
    0.0
    """
    case = TorchCase(fn_or_op, inputs, torch_function, attrs, wrt)
    return check_many_against_torch([case], through=through, target=target, rtol=rtol, seed=seed)


def check_many_against_torch(
    cases: Sequence[TorchCase],
    *,
    through: str = "relax_grad",
    target: tvm.target.Target | str | Mapping | None = None,
    rtol: float = 1e-7,
    seed: int = 0,
) -> float:
    """Compare several calls with PyTorch, in float64.

    The calls are compiled in one module, which takes a fraction of the time of separate
    compilation.

    Parameters
    ----------
    cases : Sequence[TorchCase]
        The calls.
    through, target, rtol, seed
        As for :func:`relax_grad.testing.check_against_torch`.

    Returns
    -------
    max_error : float
        The largest error found; 0 if there are no cases.

    Raises
    ------
    GradientCheckError
        If a value or gradient differs. Names the case, the argument, the worst element and both
        numbers.

    Examples
    --------
    >>> import numpy as np
    >>> from relax_grad.testing import TorchCase, check_many_against_torch
    >>> x = np.random.default_rng(0).normal(size=(3, 4))
    >>> sine = TorchCase("relax.sin", [x], lambda torch, x: torch.sin(x))
    >>> tangent = TorchCase("relax.tanh", [x], lambda torch, x: torch.tanh(x))
    >>> check_many_against_torch([sine, tangent]) < 1e-12
    True
    """
    if not isinstance(cases, (list, tuple)):
        raise TypeError(f"cases must be a list of type TorchCase, but it is {cases!r}")
    check_tolerance("rtol", rtol)
    for case in cases:
        if not isinstance(case, TorchCase):
            raise TypeError(f"cases must be of type TorchCase, but one is {case!r}")
    if not cases:
        return 0.0
    prepared = [PreparedParity(case, through, rtol, seed) for case in cases]
    return max(report.max_error for report in check_together(prepared, target))


class PreparedParity:
    """A comparison with its differentiated program.

    Attributes
    ----------
    modules : list[tvm.IRModule]
        The program.
    description : str
        The shapes and attributes, for errors.
    """

    def __init__(self, case: TorchCase, through: str, rtol: float, seed: int):
        if not callable(case.torch_function):
            raise TypeError(
                "torch_function must be callable, such as lambda torch, x: torch.exp(x), but it is "
                f"{described(case.torch_function)}"
            )
        check_tolerance("rtol", rtol)
        self.name, function = resolve(case.fn_or_op)
        self.case = case
        self.arguments = _program.make_arguments(case.inputs, "float64", case.symbolic)
        rng = np.random.default_rng(seed)
        self.program = _program.first_order(function, self.arguments, case.attrs, rng)
        self.wrt = select_wrt(self.program.arguments, case.wrt)
        self.modules = [_program.differentiate(self.program, self.wrt, through)]
        shapes = [a.value.shape for a in self.program.arguments]
        self.description = f"shapes {shapes}, attributes {dict(case.attrs)}"
        self._rtol = rtol

    def check(self, run: Callable, first: int) -> GradientReport:
        """Compare with PyTorch; ``run`` executes the compiled modules, of which ``first`` is the
        number of the program."""
        loss, gradients = run(f"main_{first}_adjoint", self.program.values())
        torch_loss, torch_gradients = self.run_torch()
        largest = _compare(self.name, "the result", loss, torch_loss, self._rtol)
        comparisons = 1
        for argument, gradient, expected in zip(self.wrt, gradients, torch_gradients, strict=True):
            tensor = f"the gradient of {argument}"
            largest = max(largest, _compare(self.name, tensor, gradient, expected, self._rtol))
            comparisons += gradient.size
        return GradientReport(self.name, 1, largest, comparisons)

    def run_torch(self) -> tuple[np.ndarray, list[np.ndarray]]:
        """Return PyTorch's loss and gradients."""
        import torch

        leaves = {}

        def to_torch(argument: Any) -> Any:
            if isinstance(argument, tuple):
                return tuple(to_torch(item) for item in argument)
            tensor = torch.from_numpy(argument.value.copy())
            leaves[argument.name] = tensor.requires_grad_() if argument.is_float else tensor
            return tensor

        tensors = [to_torch(a) for a in self.arguments if isinstance(a, (tuple, _program.Argument))]
        try:
            outputs = self.case.torch_function(torch, *tensors)
        except TypeError as error:
            raise TypeError(
                "torch_function is called with the module torch and the tensors, such as "
                f"lambda torch, x: torch.exp(x): {error}"
            ) from error
        outputs = [outputs] if isinstance(outputs, torch.Tensor) else outputs
        if not isinstance(outputs, (tuple, list)):
            raise TypeError(f"torch_function must return tensors, but it returned {outputs!r}")
        arguments = self.program.arguments
        cotangents = [a for a in arguments if a.name.startswith("cotangent")]
        for i, (output, cotangent) in enumerate(zip(outputs, cotangents, strict=True)):
            if tuple(output.shape) != cotangent.value.shape:
                raise GradientCheckError(
                    f"{self.name}: output {i} has the shape {cotangent.value.shape}, but PyTorch's "
                    f"has the shape {tuple(output.shape)}"
                )
        total = sum(
            (output * torch.from_numpy(cotangent.value)).sum()
            for output, cotangent in zip(outputs, cotangents, strict=True)
        )
        gradients = torch.autograd.grad(
            total, [leaves[name] for name in self.wrt], materialize_grads=True
        )
        return total.detach().numpy(), [gradient.numpy() for gradient in gradients]


def _compare(
    name: str, tensor: str, actual: np.ndarray, expected: np.ndarray, rtol: float
) -> float:
    worst = difference(actual, expected)
    if not worst.error <= rtol:
        raise GradientCheckError(
            f"{name}: {tensor} differs from PyTorch's; the worst element is [{worst.at}], which is "
            f"{worst.actual:.9g}, but PyTorch gives {worst.wanted:.9g}"
        )
    return worst.error
