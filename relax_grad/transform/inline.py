"""Functions in the place of the only call of them."""

from __future__ import annotations

from collections.abc import Mapping

import tvm
from tvm import relax, tirx
from tvm.ir import GlobalVar
from tvm_ffi import structural_equal

from .._bindings import bindings_of
from .._compat import Analyzer
from .._module import has_conditions, referred_to
from ._dataflow import in_dataflow

#: Attributes of functions that mean something to others.
_FOREIGN = ("Primitive", "Composite", "Codegen", "relax.force_pure")


@tvm.transform.module_pass(opt_level=0, name="relax_grad.InlineOnlyCalls")
class InlineOnlyCalls:
    """Put Relax functions that are called at only one place there.

    What they return is then known to die, and its memory is planned: of a training step that calls the function
    that differentiation makes, the gradients. A function that can be called from outside stays in the module.

    Functions with casts stay as they are, and those with conditions in their extents, which TVM does not copy. So do
    calls in branches, whose memory TVM would plan as if each branch were taken, and calls whose arguments are not
    known to have the types of the parameters: what is called would check them.
    """

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        functions = {
            variable: function
            for variable, function in mod.functions_items()
            if isinstance(function, relax.Function)
        }
        calls = _only_calls(functions)
        chosen = {
            callee: functions[callee]
            for callee, (caller, call) in calls.items()
            if _may_move(functions[callee]) and not _has_casts(functions[caller])
            if _fit(functions[callee].params, call.args)
        }
        for recursive in relax.analysis.detect_recursion(mod):
            for variable in recursive:
                chosen.pop(variable, None)
        if not chosen:
            return mod
        updated = dict(mod.functions_items())
        for caller in {calls[callee][0] for callee in chosen}:
            inlined = in_dataflow(functions[caller].inline_functions(chosen))
            own = [callee for callee in chosen if calls[callee][0] == caller]
            unknown_before = sum(_unknown_shapes(functions[each]) for each in (caller, *own))
            # TVM loses shapes of which it does not find out what the callee's extents stand for.
            if _unknown_shapes(inlined) <= unknown_before:
                updated[caller] = inlined
            else:
                chosen = {v: f for v, f in chosen.items() if v not in own}
        needed = referred_to(updated.values())
        for variable, function in chosen.items():
            if variable not in needed and not _is_public(function):
                del updated[variable]
        return tvm.IRModule(updated, attrs=mod.attrs, global_infos=mod.global_infos)


def _only_calls(
    functions: Mapping[GlobalVar, relax.Function],
) -> dict[GlobalVar, tuple[GlobalVar, relax.Call]]:
    """Return, for each function that is called once and not in a branch, who calls it and how."""
    calls: dict[GlobalVar, list[tuple[GlobalVar, relax.Call]]] = {}
    in_branches: set[GlobalVar] = set()
    for caller, function in functions.items():
        outer = {binding.var for block in function.body.blocks for binding in block.bindings}
        for binding in bindings_of(function.body):
            value = binding.value
            if isinstance(value, relax.Call) and value.op in functions:
                calls.setdefault(value.op, []).append((caller, value))
                if binding.var not in outer:
                    in_branches.add(value.op)
    return {
        callee: found[0]
        for callee, found in calls.items()
        if len(found) == 1 and callee not in in_branches
    }


def _may_move(function: relax.Function) -> bool:
    attrs = function.attrs or {}
    if _has_casts(function) or has_conditions(function):
        return False
    return not any(name in attrs for name in _FOREIGN)


def _has_casts(function: relax.Function) -> bool:
    """Tell whether a function has casts, which TVM would lose on the way."""
    return any(isinstance(binding, relax.MatchCast) for binding in bindings_of(function.body))


def _unknown_shapes(function: relax.Function) -> int:
    """Return how many tensors of unknown shape bindings make."""

    def of(kind: relax.Type) -> int:
        if isinstance(kind, relax.TupleType):
            return sum(map(of, kind.fields))
        return isinstance(kind, relax.TensorType) and not isinstance(kind.shape, relax.ShapeExpr)

    return sum(of(binding.var.ty) for binding in bindings_of(function.body))


def _is_public(function: relax.Function) -> bool:
    return function.attrs is not None and "global_symbol" in function.attrs


def _fit(params, arguments) -> bool:
    """Tell whether arguments are known to have the types of parameters."""
    known = _Extents()
    return all(known.fit(p.ty, a.ty) for p, a in zip(params, arguments, strict=True))


class _Extents:
    """What the extents of parameters stand for."""

    def __init__(self):
        self._analyzer = Analyzer()
        self._bound: set[tirx.Var] = set()

    def fit(self, wanted: relax.Type, found: relax.Type) -> bool:
        """Tell whether a type is what is wanted of it; the first extent that is found for a variable binds it."""
        kinds = wanted, found
        if all(isinstance(kind, relax.TupleType) for kind in kinds):
            return len(wanted.fields) == len(found.fields) and all(
                map(self.fit, wanted.fields, found.fields)
            )
        if not all(isinstance(kind, relax.TensorType) for kind in kinds):
            return structural_equal(wanted, found)
        if not all(isinstance(kind.shape, relax.ShapeExpr) for kind in kinds):
            return False
        if wanted.ndim != found.ndim or wanted.dtype != found.dtype:
            return False
        return all(map(self._is_extent, wanted.shape.values, found.shape.values))

    def _is_extent(self, wanted: tirx.PrimExpr, found: tirx.PrimExpr) -> bool:
        if isinstance(wanted, tirx.Var) and wanted not in self._bound:
            self._bound.add(wanted)
            self._analyzer.bind(wanted, found)
        return self._analyzer.can_prove_equal(wanted, found)
