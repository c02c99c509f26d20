"""PyTorch functions of tensors imported, compiled together, and held against PyTorch's values and
gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import tvm
from torch import nn
from torch.utils import _pytree as pytree
from torch_models import close, torch_values, tvm_value
from tvm import relax

import relax_grad
from relax_grad.frontend.torch import Imported, from_exported_program


class Case(NamedTuple):
    """A function with its operands.

    Attributes
    ----------
    name : str
        Its name in reports.
    function : Callable
        A function of tensors that returns a tensor or a tuple of tensors.
    operands : tuple[torch.Tensor, ...]
        The tensors; gradients are taken with respect to those of floating-point numbers.
    gradient : bool
        Whether to compare gradients.
    tolerance : float or None
        As for :func:`torch_models.close`.
    """

    name: str
    function: Callable
    operands: tuple
    gradient: bool = True
    tolerance: float | None = None


class _Module(nn.Module):
    """Returns the sum of the weighted results, if they are differentiated, and the results."""

    def __init__(self, case: Case):
        super().__init__()
        self.case = case
        self.weights = None

    def forward(self, *operands):
        results = self.case.function(*operands)
        results = list(results) if isinstance(results, (tuple, list)) else [results]
        total = None
        for result in results if self.case.gradient else []:
            if result.is_floating_point():
                weights = _weights(result)
                part = (result * weights).sum()
                total = part if total is None else total + part
        return tuple(results) if total is None else (total, *results)


def _weights(data: torch.Tensor) -> torch.Tensor:
    """Return numbers that differ from element to element."""
    places = torch.arange(data.numel(), dtype=torch.float64).reshape(data.shape)
    return (torch.remainder(places * 0.37, 1.0) + 0.5).to(data.dtype)


def imported(case: Case) -> tuple[Imported, str]:
    """Return a case's import, and the name of its function."""
    return _import(_Module(case), case.operands)


def _import(module: nn.Module, operands: tuple) -> tuple[Imported, str]:
    exported = torch.export.export(module, operands, strict=False)
    program = from_exported_program(exported)
    (name,) = (
        variable.name_hint
        for variable in program.module.get_global_vars()
        if variable.name_hint in ("loss", "training")
    )
    return program, name


def machine(module: tvm.IRModule) -> relax.VirtualMachine:
    """Return a compiled module."""
    built = tvm.compile(module, relax_grad.target.host(), relax_pipeline="relax_grad")
    return relax.VirtualMachine(built, tvm.cpu())


def check_all(cases: Sequence[Case]) -> dict[str, str]:
    """Return the faults of cases by name.

    The cases are parts of one program, which is traced and compiled once. If it has a fault, each
    case is checked alone.
    """
    try:
        _check_together(cases)
    except Exception as error:
        whole = f"{type(error).__name__}: {error}"[:600]
        return faults_of(cases) or {"the cases in one program": whole}
    return {}


class _Together(nn.Module):
    """Returns the sum of the losses of several cases, if there is one, and the results of all of
    them."""

    def __init__(self, cases: Sequence[Case]):
        super().__init__()
        self.parts = [_Module(case) for case in cases]

    def forward(self, *operands):
        total, results, operands = None, [], iter(operands)
        for part in self.parts:
            results_of = part(*itertools.islice(operands, len(part.case.operands)))
            results += results_of
            if part.case.gradient and results_of[0].is_floating_point():
                loss = results_of[0].double()
                total = loss if total is None else total + loss
        return tuple(results) if total is None else (total, *results)


def _check_together(cases: Sequence[Case]) -> None:
    """Assert that the values and gradients of cases in one program are those of PyTorch."""
    expected = [_expected(case) for case in cases]
    operands = tuple(operand.clone() for case in cases for operand in case.operands)
    program, name = _import(_Together(cases), operands)
    module, values = program.module, _constants(program)
    wrt = [
        place
        for place, (case, operand) in enumerate(
            ((case, tensor) for case in cases for tensor in case.operands), start=1
        )
        if case.gradient and operand.is_floating_point()
    ]
    differentiated = name == "loss" and bool(wrt)
    if differentiated:
        module = relax_grad.value_and_grad(module, name, wrt=wrt)
        name = f"{name}_adjoint"
    module = tvm.IRModule({name: module[name]})
    result = machine(module)[name](*map(tvm_value, (torch.tensor(0), *operands)), *values)
    result = torch_values(result)
    results, gradients = result if differentiated else (result, [])
    count = sum(len(wanted) for wanted, _ in expected)
    results, gradients = iter(_results(results, count)), iter(gradients)
    for case, (wanted, slopes) in zip(cases, expected, strict=True):
        own = list(itertools.islice(results, len(wanted)))
        close(f"value of {case.name}", own, wanted, case.tolerance)
        own = list(itertools.islice(gradients, len(slopes)))
        close(f"gradient of {case.name}", own, slopes, case.tolerance)
    assert next(gradients, None) is None


def faults_of(cases: Sequence[Case]) -> dict[str, str]:
    """Return the faults of cases by name. Each is traced alone; they are compiled together."""
    faults, functions, built = {}, {}, []
    for i, case in enumerate(cases):
        try:
            program, name = imported(case)
            module = program.module
            places = [
                k + 1 for k, operand in enumerate(case.operands) if operand.is_floating_point()
            ]
            differentiated = case.gradient and name == "loss" and bool(places)
            if differentiated:
                module = relax_grad.value_and_grad(module, name, wrt=places)
                name = f"{name}_adjoint"
        except Exception as error:
            faults[case.name] = f"{type(error).__name__}: {error}"[:600]
            continue
        entry = f"case{i}"
        functions[entry] = module[name].with_attr("global_symbol", entry)
        built.append((case, entry, differentiated, program))
    try:
        run = machine(tvm.IRModule(functions))
        runs = [run] * len(built)
    except Exception:
        runs = []
        for case, entry, *_ in built:
            try:
                runs.append(machine(tvm.IRModule({entry: functions[entry]})))
            except Exception as error:
                faults[case.name] = f"compile {type(error).__name__}: {str(error)[-600:]}"
                runs.append(None)
    for (case, entry, differentiated, program), run in zip(built, runs, strict=True):
        if run is None:
            continue
        try:
            _compare(case, entry, differentiated, program, run)
        except Exception as error:
            faults[case.name] = f"{type(error).__name__}: {error}"[:600]
    return faults


def _compare(case: Case, entry: str, differentiated: bool, program: Imported, run) -> None:
    inputs = [tvm_value(operand) for operand in (torch.tensor(0), *case.operands)]
    program = torch_values(run[entry](*inputs, *_constants(program)))
    wanted, expected = _expected(case, differentiated)
    values, gradients = program if differentiated else (program, [])
    close("value", _results(values, len(wanted)), wanted, case.tolerance)
    close("gradient", gradients, expected, case.tolerance)


def _constants(program: Imported) -> list[tvm.runtime.Tensor]:
    """Return the values of an import that follow its inputs."""
    groups = program.params, program.frozen, program.states
    return [tensor for group in groups for tensor in group.values()]


def _expected(case: Case, differentiated: bool = True) -> tuple[Sequence[torch.Tensor], list]:
    """Return PyTorch's results of a case's module, and the gradients if the case and the argument
    ask for them."""
    differentiated = differentiated and case.gradient
    operands = [
        operand.clone().requires_grad_(operand.is_floating_point() and differentiated)
        for operand in case.operands
    ]
    wanted = _Module(case)(*operands)
    leaves = [operand for operand in operands if operand.requires_grad]
    if not leaves:
        return wanted, []
    if not wanted[0].requires_grad:
        return wanted, [torch.zeros_like(leaf) for leaf in leaves]
    grads = torch.autograd.grad(wanted[0], leaves, allow_unused=True)
    pairs = zip(leaves, grads, strict=True)
    return wanted, [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in pairs]


def _results(outputs, count: int) -> list[torch.Tensor]:
    """Return the last tensors of a nested result, without the new states, of which there are
    none."""
    return pytree.tree_leaves(outputs)[-count:]
