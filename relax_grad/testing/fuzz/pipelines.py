"""Comparison of random programs in float32, compiled by the pipeline for several targets and by
TVM's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.script import from_source

from ...transform import Gradient
from .differential import (
    TARGET,
    call,
    compare,
    float_leaves,
    has_local_functions,
    variables,
)
from .script import BATCH, Program

#: The largest accepted error relative to the largest number, by the narrowest dtype. Two pipelines
#: may round to neighbouring numbers in half precision.
TOLERANCES = {"float64": 2e-4, "float32": 2e-4, "float16": 5e-2, "bfloat16": 0.2}


def in_float32(program: Program, name: str) -> tvm.IRModule:
    """Return a program's module with its adjoint function, in float32, with ``main`` under the name
    ``name``."""
    source = program.source(name).replace("float64", "float32")
    module = from_source(source)
    gradient = Gradient(name, variables(module, name, program), program.target or 0)
    return gradient(module)  # type: ignore[operator]  # TVM's decorator makes a pass of the class


def values_of(program: Program, batch: int = BATCH) -> list:
    """Return values of a program's parameters in float32, for one value of the symbolic batch."""
    rng = np.random.default_rng(program.seed)

    def draw(kind: Any) -> Any:
        if isinstance(kind, tuple):
            return [draw(item) for item in kind]
        if kind.dtype == "bool":
            return np.array(rng.integers(2), "bool")
        shape = [size // BATCH * batch if size % BATCH == 0 else size for size in kind.shape]
        return rng.uniform(-1, 1, shape).astype("float32")

    return [draw(param.kind) for param in program.main.params]


def merged(modules: Sequence[tvm.IRModule]) -> tvm.IRModule:
    """Merge modules with distinct function names into one."""
    functions = {}
    for module in modules:
        for variable, function in module.functions_items():
            functions[variable.name_hint] = (variable, function)
    return tvm.IRModule(dict(functions.values()))


def machines_of(module: tvm.IRModule, targets: Mapping) -> Mapping[str, relax.VirtualMachine]:
    """Compile a module by the pipeline for each target, and by TVM's pipeline under the key
    ``"default"``."""
    compiled = {
        name: tvm.compile(module, tvm.target.Target(target), relax_pipeline="relax_grad")
        for name, target in targets.items()
    }
    compiled["default"] = tvm.compile(module, tvm.target.Target(TARGET), relax_pipeline="default")
    return {
        name: relax.VirtualMachine(executable, tvm.cpu()) for name, executable in compiled.items()
    }


def check_pipelines(
    programs: Sequence[Program],
    batches: Sequence[int],
    targets: Mapping,
) -> None:
    """Compare the results of adjoint functions, compiled together, between the pipeline and TVM's
    pipeline.

    Parameters
    ----------
    programs : Sequence[Program]
        The programs.
    batches : Sequence[int]
        Values of the symbolic batch.
    targets : Mapping[str, tvm.target.Target or Mapping]
        The compilation targets, by name.

    Raises
    ------
    Mismatch
        If a result differs. Names the program, the target, the batch and the element.
    """
    names = {}
    for i, program in enumerate(programs):
        module = in_float32(program, f"p{i}")
        if not has_local_functions(module[f"p{i}_adjoint"]):
            kept = {v: f for v, f in module.functions_items() if v.name_hint != f"p{i}"}
            names[f"p{i}_adjoint"] = program, tvm.IRModule(kept)
    if not names:
        return
    machines = dict(machines_of(merged([module for _, module in names.values()]), targets))
    stock = machines.pop("default")
    for name, (program, _) in names.items():
        for batch in batches if program.is_symbolic else (BATCH,):
            values = values_of(program, batch)
            wanted = float_leaves(call(stock, name, values))
            for target, machine in machines.items():
                results = float_leaves(call(machine, name, values))
                other = f"TVM's pipeline ({program}, {name}, compiled for {target}, batch {batch})"
                compare("pipeline", results, wanted, TOLERANCES[program.narrowest], other)
