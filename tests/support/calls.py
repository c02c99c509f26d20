"""Modules with a single call, its type and its value."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import programs
import tvm
from programs import tensor
from tvm import relax
from tvm.script import from_source
from tvm_ffi import structural_equal

__all__ = [
    "build",
    "check_round_trip",
    "module_of",
    "params_of",
    "same",
    "tensor",
    "type_of",
    "value_of",
    "var",
]


def var(name: str, shape: Sequence | None = None, dtype: str = "float32", ndim: int = -1):
    """Return a variable for a tensor, by default of an unknown shape."""
    return relax.Var(name, relax.TensorType(shape, dtype, ndim=ndim))


def type_of(call: relax.Expr) -> relax.Type:
    """Return the inferred type of a call."""
    return relax.BlockBuilder().normalize(call).ty


def same(a: relax.Type, b: relax.Type) -> bool:
    """Tell whether types are equal up to the names of their symbolic extents."""
    return structural_equal(a, b, map_free_vars=True)


def build(params: Sequence[relax.Var], body: Callable) -> tvm.IRModule:
    """Return a module whose ``main`` returns ``body(*params)``."""
    return programs.build(params, lambda _builder, *arguments: body(*arguments))


def module_of(types: Sequence[relax.Type], body: Callable) -> tvm.IRModule:
    """Return a module whose ``main`` returns ``body`` of parameters of these types."""
    return build([relax.Var(f"x{i}", kind) for i, kind in enumerate(types)], body)


def params_of(values: Sequence[np.ndarray]) -> list[relax.Var]:
    """Return parameters of the types of arrays."""
    return [tensor(f"x{i}", array.shape, array.dtype.name) for i, array in enumerate(values)]


def value_of(function: Callable, *values: np.ndarray, **attrs):
    """Return the result of a function of tensors at these values, compiled by TVM's pipeline."""
    module = build(params_of(values), lambda *params: function(*params, **attrs))
    return programs.run(module, "main", *values)


def check_round_trip(module: tvm.IRModule, operator: str) -> None:
    """Assert that the script of a module calls an operator, and that the script and the JSON of the
    module are read back to the same module."""
    script = module.script()
    assert f"R.{operator}(" in script
    tvm.ir.assert_structural_equal(from_source(script), module)
    tvm.ir.assert_structural_equal(tvm.ir.load_json(tvm.ir.save_json(module)), module)
