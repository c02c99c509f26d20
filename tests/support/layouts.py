"""Helpers of the layout conversion tests: the passes, and the transposes that remain in a
function."""

from __future__ import annotations

from collections.abc import Iterator

import tvm
from tvm import relax, tirx
from tvm.relax import transform

#: The requested layouts for convolutions of each rank.
CHANNELS_LAST = {
    "relax.nn.conv1d": ["NWC", "OWI"],
    "relax.nn.conv2d": ["NHWC", "OHWI"],
    "relax.nn.conv3d": ["NDHWC", "ODHWI"],
}


def converted(module: tvm.IRModule, desired=None, layout_cb=None) -> tvm.IRModule:
    """Convert the layouts of a module as the documentation describes."""
    convert = transform.ConvertLayout(desired or CHANNELS_LAST, layout_cb)
    return tidied(convert(tidied(module)))


def tidied(module: tvm.IRModule) -> tvm.IRModule:
    """Remove renaming bindings, common subexpressions and dead code."""
    passes = [
        transform.CanonicalizeBindings(),
        transform.EliminateCommonSubexpr(),
        transform.DeadCodeElimination(),
    ]
    return tvm.transform.Sequential(passes)(module)


def calls(function: relax.Function, *op_names: str) -> Iterator[relax.VarBinding]:
    """Yield the bindings of calls of operators."""
    for block in function.body.blocks:
        for binding in block.bindings:
            value = binding.value
            if isinstance(value, relax.Call) and getattr(value.op, "name", None) in op_names:
                yield binding


def transpositions(function: relax.Function) -> list[relax.VarBinding]:
    """Return the bindings that permute the elements of a tensor of three or more axes.

    Transposes of matrices belong to ``matmul``, transposes along axes of extent 1 move nothing, and
    transposes of constants are folded.
    """
    bindings = calls(function, "relax.permute_dims", "relax.layout_transform")
    return [
        binding
        for binding in bindings
        if binding.var.ty.ndim > 2
        and isinstance(binding.value.args[0], relax.Var)
        and _moves(binding.value)
    ]


def _moves(call: relax.Call) -> bool:
    if call.op.name == "relax.layout_transform":
        return True
    shape = call.args[0].ty.shape.values
    axes = [int(axis) for axis in call.attrs.axes if not _is_one(shape[int(axis)])]
    return axes != sorted(axes)


def _is_one(extent: tirx.PrimExpr) -> bool:
    return isinstance(extent, tirx.IntImm) and int(extent) == 1


def edges(function: relax.Function) -> tuple[list[str], list[str], int]:
    """Classify the transposes of a function.

    Returns
    -------
    parameters : list[str]
        The transposed parameters.
    results : list[str]
        The results that are transposed before they are returned.
    inside : int
        The number of other transposes.
    """
    names = {param.name for param in function.params}
    returned = _variables(function.body.body)
    parameters, results, inside = [], [], 0
    for binding in transpositions(function):
        (source,) = binding.value.args
        if source.name in names:
            parameters.append(source.name)
        elif binding.var in returned:
            results.append(binding.var.name)
        else:
            inside += 1
    return sorted(parameters), sorted(results), inside


def _variables(expr: relax.Expr) -> list[relax.Var]:
    if isinstance(expr, relax.Tuple):
        return [var for field in expr.fields for var in _variables(field)]
    return [expr]
