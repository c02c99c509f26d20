"""The storages that a planned function allocates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import tvm
from tvm import relax, tirx
from tvm.ir import GlobalVar

from ..ir.aliases import is_name, leaves, named_by
from ..ir.bindings import bindings_of
from ..ir.compat import Analyzer, dtype_of
from ..ir.module import referred_to

#: The pass that plans storages.
PLANS = "StaticPlanBlockMemory"

_STORAGE, _TENSOR = "relax.memory.alloc_storage", "relax.memory.alloc_tensor"
_SINGLE = "relax.builtin.alloc_tensor"


class Planned(NamedTuple):
    """Bytes of the storages of a function: of the returned tensors, and of the others."""

    results: int
    intermediate: int


def storages_of(mod: tvm.IRModule, name: str, extents: Mapping[str, int]) -> Planned:
    """Return the bytes of the storages of a function and of the functions that it calls, after
    :data:`PLANS`.

    Parameters
    ----------
    mod : tvm.IRModule
        The module.
    name : str
        The function.
    extents : Mapping[str, int]
        The values of symbolic extents.

    Raises
    ------
    ValueError
        If the value of an extent is missing.
    """
    functions = [mod[name]]
    for function in functions:
        functions += [
            mod[callee]
            for callee in _callees(function)
            if isinstance(mod[callee], relax.Function) and mod[callee] not in functions
        ]
    plans = [_storages(function, extents) for function in functions]
    results = plans[0].results
    return Planned(results, sum(map(sum, plans)) - results)


def _callees(function: relax.Function) -> list[GlobalVar]:
    return sorted(referred_to([function]), key=lambda variable: variable.name_hint)


def _storages(function: relax.Function, extents: Mapping[str, int]) -> Planned:
    """Return the bytes of the storages that a function allocates."""
    sizes: dict[relax.Var, int] = {}
    names: dict[relax.Var, object] = {}
    for binding in bindings_of(function.body):
        variable, value = binding.var, binding.value
        operator = getattr(getattr(value, "op", None), "name", None)
        if operator == _STORAGE:
            sizes[variable] = _product(value.args[0], extents)
            names[variable] = variable
        elif operator == _SINGLE:
            width = tvm.DataType(dtype_of(value.ty)).bits
            sizes[variable] = _product(value.args[0], extents) * width // 8
            names[variable] = variable
        elif operator == _TENSOR:
            names[variable] = named_by(value.args[0], names)
        elif is_name(value):
            names[variable] = named_by(value, names)
    returned = set(leaves(named_by(function.body.body, names)))
    results = sum(size for variable, size in sizes.items() if variable in returned)
    return Planned(results, sum(sizes.values()) - results)


def _product(shape: relax.Expr, extents: Mapping[str, int]) -> int:
    """Return the product of the extents of a shape."""
    product = 1
    for extent in shape.values:
        product *= value_of(extent, extents)
    return product


def value_of(extent: tirx.PrimExpr, extents: Mapping[str, int]) -> int:
    """Return the value of an extent, or raise ValueError for a variable without a value."""
    if isinstance(extent, tirx.IntImm):
        return int(extent)
    analyzer = Analyzer()
    for variable in tirx.analysis.undefined_vars(extent):
        if variable.name not in extents:
            raise ValueError(
                f"extents: the upper bound of {variable.name} is missing; the step has this "
                f'symbolic extent: pass extents={{"{variable.name}": 32}}'
            )
        analyzer.bind(variable, tirx.IntImm(str(variable.ty.dtype), extents[variable.name]))
    return int(analyzer.simplify(extent))
