"""Parsing and joint compilation of random programs, their PyTorch reference, and comparison of
results."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.ir import GlobalVar
from tvm.script import from_source

from ...ir.bindings import bindings_of
from .._compare import difference
from .._program import UNOPTIMIZED, to_numpy
from .script import Program, flat, project

#: The compilation target.
TARGET = UNOPTIMIZED


def parse(program: Program, name: str) -> tvm.IRModule:
    """Return the module of a program, with ``main`` under the name ``name``."""
    return from_source(program.source(name))


def variables(module: tvm.IRModule, name: str, program: Program) -> list[relax.Var]:
    """Return the variables of a function for the values of ``program.wrt``."""
    function = module[name]
    variables = {binding.var.name: binding.var for binding in bindings_of(function.body)}
    variables.update((param.name, param) for param in function.params)
    return [variables[value.name] for value in program.wrt]


def compile_all(modules: Sequence) -> relax.VirtualMachine:
    """Compile modules, or mappings from names to functions, together; the function names must be
    distinct.

    Operators are not fused. Programs share most kernels of single operators, but few fused kernels,
    and the compilation of kernels takes most of the time.
    """
    functions = {}
    for module in modules:
        items = module.functions_items() if isinstance(module, tvm.IRModule) else module.items()
        for name, function in items:
            if isinstance(name, str):
                name, function = GlobalVar(name), function.with_attr("global_symbol", name)
            functions[name.name_hint] = (name, function)
    module = tvm.IRModule(dict(functions.values()))
    target = tvm.target.Target(TARGET)
    with target:
        compiled = tvm.compile(module, target=target, relax_pipeline=_pipeline(target))
    return relax.VirtualMachine(compiled, tvm.cpu())


def has_local_functions(function: relax.Function) -> bool:
    """Tell whether a function still has local functions, which TVM does not compile.

    Where they capture a tuple, the result of TVM's LambdaLift fails TVM's type checks.
    """
    return any(isinstance(binding.value, relax.Function) for binding in bindings_of(function.body))


def _pipeline(target: tvm.target.Target) -> tvm.transform.Pass:
    passes = relax.backend.cpu_generic.pipeline
    skipped = {"FuseOps", "FuseTIR"}
    steps = [
        *passes.library_dispatch_passes(target),
        *(step for step in passes.legalize_passes(target) if step.info.name not in skipped),
        *passes.dataflow_lower_passes(target),
        *passes.finalize_passes(target),
    ]
    return tvm.transform.Sequential(steps)


def call(machine: relax.VirtualMachine, name: str, values: Sequence) -> object:
    """Run a function on arrays and (nested) lists of arrays."""
    return to_numpy(machine[name](*map(_to_runtime, values)))


def _to_runtime(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_to_runtime(item) for item in value]
    return tvm.runtime.tensor(value)


def to_torch(torch: ModuleType, value: object) -> object:
    """Convert arrays in (nested) sequences to PyTorch tensors."""
    if isinstance(value, (list, tuple)):
        return tuple(to_torch(torch, item) for item in value)
    return torch.from_numpy(np.array(value))


class Reference:
    """The evaluation and differentiation of a program in PyTorch."""

    def __init__(self, torch: ModuleType, program: Program):
        self.torch, self.program = torch, program
        self.values = [to_torch(torch, value) for value in program.values()]
        self.result = program.evaluate(torch, self.values)

    def moved_by(self, deltas: Sequence) -> object:
        """Return the result with the offsets ``deltas`` added to the floating-point tensors of
        ``wrt``."""
        moved, rest = {}, list(deltas)
        for value in self.program.wrt:
            moved[value.name] = self._take(value.kind, rest)
        return self.program.evaluate(self.torch, self.values, moved)

    def zeros(self) -> list:
        """Return zeros for each tensor to differentiate with respect to."""
        leaves = [t for value in self.program.wrt for t in flat(value.kind) if t.is_float]
        return [self.torch.zeros(leaf.shape, dtype=self.torch.float64) for leaf in leaves]

    def gradients(self) -> list:
        """Return the gradients of the target with respect to each of these tensors."""
        deltas = [zeros.requires_grad_() for zeros in self.zeros()]
        target = self.target_at(deltas)
        gradients = [None] * len(deltas)
        if target.requires_grad:
            gradients = self.torch.autograd.grad(target, deltas, allow_unused=True)
        pairs = zip(gradients, deltas, strict=True)
        return [self.torch.zeros_like(d) if g is None else g for g, d in pairs]

    def target_at(self, deltas: Sequence) -> Any:
        """Return the target with the offsets ``deltas`` added to the floating-point tensors of
        ``wrt``."""
        return project(self.moved_by(deltas), self.program.target)

    def _take(self, kind: Any, rest: list) -> Any:
        if isinstance(kind, tuple):
            return tuple(self._take(item, rest) for item in kind)
        return rest.pop(0) if kind.is_float else None


def float_leaves(value: object) -> list:
    """Return the floating-point tensors of a value of PyTorch or NumPy."""
    return [leaf for leaf in flat(value) if "float" in str(leaf.dtype)]


class Mismatch(Exception):
    """A difference between numbers.

    Attributes
    ----------
    kind : str
        The kind of numbers, for example ``"gradient"``.
    message : str
        The place and the size of the difference.
    """

    def __init__(self, kind: str, message: str):
        super().__init__(f"{kind}: {message}")
        self.kind, self.message = kind, message


def compare(kind: str, actual: Sequence, wanted: Sequence, tolerance: float, other: str) -> None:
    """Compare arrays pairwise, relative to the largest number of each expected array.

    Raises
    ------
    Mismatch
        If they differ by more than the tolerance.
    """
    if len(actual) != len(wanted):
        raise Mismatch(kind, f"{len(actual)} tensors, but {other} has {len(wanted)}")
    for i, (tensor, two) in enumerate(zip(actual, wanted, strict=True)):
        if tensor.shape != two.shape:
            raise Mismatch(kind, f"tensor {i} has the shape {tensor.shape}, {two.shape} in {other}")
        worst = difference(tensor, two)
        if not worst.error <= tolerance:
            raise Mismatch(
                kind,
                f"tensor {i} at [{worst.at}] is {worst.actual:.9g}, but {worst.wanted:.9g} in "
                f"{other}",
            )
