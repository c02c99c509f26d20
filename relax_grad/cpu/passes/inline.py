"""Inlining of functions with a single call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import tvm
from tvm import relax
from tvm.ir import GlobalVar

from ...ir.arguments import with_shapes
from ...ir.bindings import bindings_of
from ...ir.inlining import write_out_calls
from ...ir.module import has_conditions, is_known, referred_to

#: Attributes of functions that other passes or code generators interpret.
_FOREIGN = ("Primitive", "Composite", "Codegen", "relax.force_pure")


@tvm.transform.module_pass(opt_level=0, name="relax_grad.InlineSingleUse")
class InlineSingleUse:
    """Inline the Relax functions that have exactly one call.

    The lifetimes of their results then end in the caller, and their memory is planned. In a
    training step that calls the differentiated function, these results are the gradients. A
    function that can be called from outside also stays in the module.

    Functions with casts are neither inlined nor changed. Functions with conditions in their
    extents, which TVM does not copy, are not inlined. Calls in branches stay, because TVM would
    plan their memory as if each branch were taken. Calls whose arguments are not known to have the
    types of the parameters also stay, because the callee checks these types.

    Examples
    --------
    >>> from tvm import relax
    >>> from relax_grad import transform
    >>> x = relax.Var("x", relax.TensorType((3,), "float32"))
    >>> bb = relax.BlockBuilder()
    >>> with bb.function("sine", [x], private=True):
    ...     _ = bb.emit_func_output(bb.emit(relax.op.sin(x)))
    >>> y = relax.Var("y", relax.TensorType((3,), "float32"))
    >>> with bb.function("main", [y]):
    ...     _ = bb.emit_func_output(bb.emit(bb.get().get_global_var("sine")(y)))
    >>> module = transform.InlineSingleUse()(bb.get())
    >>> [variable.name_hint for variable in module.functions]
    ['main']
    """

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        functions = {
            variable: function
            for variable, function in mod.functions_items()
            if isinstance(function, relax.Function)
        }
        bindings = {v: list(bindings_of(function.body)) for v, function in functions.items()}
        calls = _only_calls(functions, bindings)
        # TVM would lose casts during inlining.
        with_casts = {v for v in functions if any(type(b) is relax.MatchCast for b in bindings[v])}
        chosen = {
            callee: functions[callee]
            for callee, (caller, call) in calls.items()
            if with_casts.isdisjoint((callee, caller)) and _may_move(functions[callee])
            if _fits(functions[callee], call)
        }
        for variable in _recursive(functions) if chosen else ():
            chosen.pop(variable, None)
        if not chosen:
            return mod
        updated = dict(mod.functions_items())
        own: dict[GlobalVar, list[GlobalVar]] = {}
        for callee in chosen:
            own.setdefault(calls[callee][0], []).append(callee)
        for caller, callees in own.items():
            if caller in chosen and not _is_public(functions[caller]):
                continue  # its body is inlined in its own caller, together with its callees
            # A public function is inlined and also stays, so that its callees are then in use at
            # two places.
            moved = () if any(_is_public(functions[variable]) for variable in chosen) else chosen
            inlined = write_out_calls(functions[caller], chosen, moved)
            unknown_before = sum(
                _unknown_shapes(bindings[variable]) for variable in (caller, *callees)
            )
            # TVM loses shapes that it cannot deduce again.
            if _unknown_shapes(bindings_of(inlined.body)) <= unknown_before:
                updated[caller] = inlined
            else:
                chosen = {v: f for v, f in chosen.items() if v not in callees}
        for variable in _unreached(updated, {v for v in chosen if not _is_public(functions[v])}):
            del updated[variable]
        return tvm.IRModule(updated, attrs=mod.attrs, global_infos=mod.global_infos)


def _unreached(
    functions: Mapping[GlobalVar, tvm.ir.BaseFunc], private: set[GlobalVar]
) -> set[GlobalVar]:
    """Return the private functions that no other function refers to, directly or through private
    functions."""
    unreached = set(private)
    pending = [function for variable, function in functions.items() if variable not in unreached]
    while pending:
        reached = referred_to([pending.pop()]) & unreached
        unreached -= reached
        pending += [functions[variable] for variable in reached]
    return unreached


def _only_calls(
    functions: Mapping[GlobalVar, relax.Function], bindings: Mapping[GlobalVar, list[relax.Binding]]
) -> dict[GlobalVar, tuple[GlobalVar, relax.Call]]:
    """Return the caller and the call of each function that is called once and not in a branch."""
    calls: dict[GlobalVar, list[tuple[GlobalVar, relax.Call]]] = {}
    in_branches: set[GlobalVar] = set()
    for caller, function in functions.items():
        bound_calls = [
            (binding.var, value)
            for binding in bindings[caller]
            if type(value := binding.value) is relax.Call
            if type(value.op) is GlobalVar and value.op in functions
        ]
        blocks = function.body.blocks[:]
        has_branches = len(bindings[caller]) > sum(len(block.bindings) for block in blocks)
        outer = (
            {binding.var for block in blocks for binding in block.bindings[:]}
            if has_branches
            else ()
        )
        for variable, call in bound_calls:
            calls.setdefault(call.op, []).append((caller, call))
            if has_branches and variable not in outer:
                in_branches.add(call.op)
    return {
        callee: sites[0]
        for callee, sites in calls.items()
        if len(sites) == 1 and callee not in in_branches
    }


def _recursive(functions: Mapping[GlobalVar, relax.Function]) -> set[GlobalVar]:
    """Return the functions that refer to themselves, directly or through other functions.

    These are the cycles of the graph of references. Tarjan's algorithm finds the strongly connected
    components, with an explicit stack. ``relax.analysis.detect_recursion`` takes quadratic time in
    the number of functions.
    """
    callees = {variable: referred_to([f]) & functions.keys() for variable, f in functions.items()}
    number: dict[GlobalVar, int] = {}
    lowest: dict[GlobalVar, int] = {}
    component: list[GlobalVar] = []
    is_open: set[GlobalVar] = set()
    recursive = {variable for variable in functions if variable in callees[variable]}
    for root in functions:
        pending: list[tuple[GlobalVar, Iterator[GlobalVar]]] = []
        if root not in number:
            pending.append((root, iter(())))
        while pending:
            current, rest = pending[-1]
            if current not in number:
                number[current] = lowest[current] = len(number)
                component.append(current)
                is_open.add(current)
                rest = iter(callees[current])
                pending[-1] = current, rest
            callee = next(
                (variable for variable in rest if variable not in number or variable in is_open),
                None,
            )
            if callee is not None:
                if callee in number:
                    lowest[current] = min(lowest[current], number[callee])
                else:
                    pending.append((callee, iter(())))
                continue
            pending.pop()
            if pending:
                caller = pending[-1][0]
                lowest[caller] = min(lowest[caller], lowest[current])
            if lowest[current] == number[current]:
                members = [component.pop()]
                while members[-1] != current:
                    members.append(component.pop())
                is_open.difference_update(members)
                if len(members) > 1:
                    recursive.update(members)
    return recursive


def _may_move(function: relax.Function) -> bool:
    attrs = function.attrs or {}
    return not any(name in attrs for name in _FOREIGN) and not has_conditions(function)


def _unknown_shapes(bindings: Iterable[relax.Binding]) -> int:
    """Return the number of tensors of unknown shape that bindings define."""

    def of(kind: relax.Type) -> int:
        if isinstance(kind, relax.TensorType):
            return type(kind.shape) is not relax.ShapeExpr
        return sum(map(of, kind.fields[:])) if isinstance(kind, relax.TupleType) else 0

    return sum(of(binding.var.ty) for binding in bindings)


def _is_public(function: relax.Function) -> bool:
    return function.attrs is not None and "global_symbol" in function.attrs


def _fits(function: relax.Function, call: relax.Call) -> bool:
    """Tell whether the arguments of a call are known to have the types of the callee's
    parameters."""
    # The extents of the arguments replace the callee's symbolic variables, each at its first
    # occurrence.
    header = with_shapes(relax.Function(function.params, relax.Tuple([])), call.args)
    return all(is_known(a.ty, p.ty) for p, a in zip(header.params, call.args, strict=True))
