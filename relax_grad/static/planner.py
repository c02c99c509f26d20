"""The way from a module with a training step to its static plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import tvm
from tvm import relax, tirx

from ..cpu.pipeline import pipeline
from ..ir.compat import dtype_of, structural_equal
from ..ir.module import with_only
from ._reader import Constants, Entry, read
from .kernels import lowered_kernels, workspaces
from .plan import STATE, Call, Function, Plan, Tensor, aligned


def plan(
    modules: Sequence[tvm.IRModule],
    entries: Sequence[Entry],
    state: Mapping[str, relax.TensorType],
    target: tvm.target.Target,
    prefix: str = "",
) -> Plan:
    """Return the plan of functions, which share one state.

    Parameters
    ----------
    modules : Sequence[tvm.IRModule]
        The same functions for inputs of one size after another, without symbolic extents.
    entries : Sequence[Entry]
        The functions.
    state : Mapping[str, relax.TensorType]
        The types of the tensors that stay from call to call, by name.
    target : tvm.target.Target
        A CPU.
    prefix : str
        The beginning of the names of kernels: programs that are linked together need different
        ones.

    Raises
    ------
    ValueError
        If a function is no list of calls of kernels. The message names the obstacle and the way
        out.
    """
    places, constants = _places(state), Constants()
    kernels = _Kernels()
    functions: list[Function] = []
    for module in modules:
        compiled = _compiled(module, entries, target, prefix)
        read_functions = [read(compiled, entry, places, constants) for entry in entries]
        names = kernels.add(compiled, read_functions)
        functions += [_renamed(function, names) for function in read_functions]
    lowered = lowered_kernels(kernels.functions, target)
    needed = workspaces(lowered)
    functions = [
        replace(
            function, workspace=max((needed[call.kernel] for call in function.calls), default=0)
        )
        for function in functions
    ]
    return Plan(tuple(functions), tuple(places.items()), bytes(constants.data), lowered)


def _places(state: Mapping[str, relax.TensorType]) -> dict[str, Tensor]:
    """Return the places of the tensors of the state, one after the other."""
    places, offset = {}, 0
    for name, ty in state.items():
        places[name] = Tensor(
            tuple(int(extent) for extent in ty.shape.values), dtype_of(ty), STATE, offset
        )
        offset += aligned(max(1, places[name].bytes))
    return places


def _compiled(
    module: tvm.IRModule, entries: Sequence[Entry], target: tvm.target.Target, prefix: str
) -> tvm.IRModule:
    """Return the module after the last pass of the pipeline, with kernels as tensor functions."""
    names = [entry.name for entry in entries]
    for name in names:
        _check_extents(module[name], name)
    module = relax.transform.DeadCodeElimination()(with_only(module, names))
    return pipeline(target, symbol_prefix=prefix)(module)


def _check_extents(function: relax.Function, name: str) -> None:
    symbols = relax.analysis.definable_tir_vars_in_type(
        relax.TupleType([parameter.ty for parameter in function.params])
    )
    if len(symbols):
        extents = sorted({symbol.name for symbol in symbols})
        given = ", ".join(f'"{extent}": 32' for extent in extents)
        raise ValueError(
            f'runtime="none": the function {name} has the symbolic extents {", ".join(extents)}; '
            f"pass their values, such as extents={{{given}}}, or a list of such mappings for "
            "several sizes"
        )


class _Kernels:
    """The kernels of several modules. Those that are equal are kept once."""

    def __init__(self) -> None:
        self.functions: dict[str, tirx.PrimFunc] = {}

    def add(self, module: tvm.IRModule, functions: Sequence[Function]) -> dict[str, str]:
        """Add the kernels that functions of a module call, and return their names here."""
        names: dict[str, str] = {}
        for function in functions:
            for call in function.calls:
                if call.kernel not in names:
                    names[call.kernel] = self._added(call.kernel, module[call.kernel])
        return names

    def _added(self, name: str, function: tirx.PrimFunc) -> str:
        while name in self.functions and not structural_equal(
            function.with_attr("global_symbol", name), self.functions[name]
        ):
            name += "_"
        self.functions[name] = function.with_attr("global_symbol", name)
        return name


def _renamed(function: Function, names: Mapping[str, str]) -> Function:
    return replace(
        function, calls=tuple(Call(names[call.kernel], call.arguments) for call in function.calls)
    )


def bound(module: tvm.IRModule, names: Sequence[str], extents: Mapping[str, int]) -> tvm.IRModule:
    """Return a module in which functions have the given symbolic extents as numbers."""
    for name in names:
        symbols = relax.analysis.definable_tir_vars_in_type(
            relax.TupleType([parameter.ty for parameter in module[name].params])
        )
        known = {symbol.name: extents[symbol.name] for symbol in symbols if symbol.name in extents}
        if known:
            module = relax.transform.BindSymbolicVars(known, name)(module)
    return module
