"""Inlining of calls of Relax functions."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import chain

import tvm
from tvm import relax
from tvm.ir import GlobalVar, Op
from tvm_ffi import structural_equal

from .arguments import bind_param, with_shapes
from .bindings import bindings_of, renamed, substitute, used, with_function_body, with_value
from .dataflow import in_dataflow
from .module import normalized

_Callees = Mapping[GlobalVar, relax.Function]


#: The classes of values that only name other values.
_NAMES = (relax.Var, relax.DataflowVar, relax.TupleGetItem, relax.Tuple)


def write_out_calls(
    function: relax.Function, callees: _Callees, moved: Collection[GlobalVar] = ()
) -> relax.Function:
    """Return a function with the calls of callees inlined, also in branches and in the callees
    themselves.

    ``relax.Function.inline_functions`` replaces the callee's symbolic variables in the types that
    it infers again, but not in shapes, in scalars and in the type arguments of calls. Here the
    extents of the arguments replace them everywhere. If an argument is not known to have the type
    of its parameter, a ``match_cast`` checks it. A recursive call stays a call.

    Parameters
    ----------
    function : relax.Function
        The caller.
    callees : Mapping[GlobalVar, relax.Function]
        The functions whose calls are replaced.
    moved : Collection[GlobalVar]
        The callees that are called once and then removed from the module. The caller takes over
        their variables.
    """
    caller = GlobalVar("caller")  # a callee may have the caller's name
    plain = relax.transform.ToNonDataflow()(tvm.IRModule({caller: function, **callees}))
    function = plain[caller]
    body = _written_out(function.body, {variable: plain[variable] for variable in callees}, moved)
    return in_dataflow(with_function_body(function, normalized(function.params, body)))


def write_out_adjoint(
    function: relax.Function, variable: GlobalVar, adjoint: relax.Function
) -> relax.Function | None:
    """Return a function with its call of an adjoint inlined, as one dataflow block, or None.

    The result is the same as of :func:`write_out_calls`, which takes several times as long, because
    each of TVM's passes infers all types again. None stands for a function with symbolic extents,
    branches, casts or impure calls. The result has the variables of the adjoint, which must not
    stay in the module.
    """
    bindings = _joined(function, variable, adjoint)
    if bindings is None:
        return None
    known: dict[relax.Expr, relax.Expr] = {}
    tuples: dict[relax.Expr, relax.Tuple] = {}
    kept = []
    for binding in bindings:
        value = binding.value
        if type(value) is relax.TupleGetItem:
            source = known.get(value.tuple_value, value.tuple_value)
            field = tuples[source].fields[value.index] if source in tuples else None
            if type(field) is relax.Tuple:
                tuples[binding.var] = field
            elif field is not None:
                value = field
        if isinstance(value, relax.Var):
            known[binding.var] = known.get(value, value)
            continue
        if type(value) is relax.Tuple:
            value = tuples[binding.var] = substitute(value, known)
        kept.append(with_value(binding, value))
    result = substitute(function.body.body, known)
    outputs = set(relax.analysis.free_vars(result))
    names: dict[relax.Expr, relax.Expr] = {}
    for binding in kept:
        wanted = relax.Var if binding.var in outputs else relax.DataflowVar
        if type(binding.var) is not wanted:
            names[binding.var] = wanted(binding.var.name, binding.var.ty)
    names |= {variable: names.get(value, value) for variable, value in known.items()}
    block = relax.DataflowBlock([_with_names(binding, names) for binding in kept])
    body = relax.SeqExpr([block], substitute(result, names))
    return with_function_body(function, normalized(function.params, body))


def _with_names(binding: relax.Binding, names: dict) -> relax.Binding:
    is_changed = binding.var in names or any(operand in names for operand in used(binding.value))
    return renamed(binding, names) if is_changed else binding


def _joined(
    function: relax.Function, variable: GlobalVar, adjoint: relax.Function
) -> list[relax.Binding] | None:
    """Return the bindings of a function and of the adjoint that it calls, or None if they are not
    all pure and of constant extents."""
    if any(relax.analysis.tir_vars_in_type(param.ty) for param in function.params):
        return None
    joined: list[relax.Binding] = []
    for binding in bindings_of(function.body):
        value = binding.value
        if not (type(value) is relax.Call and variable.same_as(value.op)):
            joined.append(binding)
            continue
        arguments = value.args[:]
        for param, argument in zip(adjoint.params, arguments, strict=True):
            if not (isinstance(argument, relax.Var) and structural_equal(argument.ty, param.ty)):
                return None
            joined.append(relax.VarBinding(param, argument))
        joined += bindings_of(adjoint.body)
        joined.append(with_value(binding, adjoint.body.body))
    return joined if all(map(_is_plain, joined)) else None


def _is_plain(binding: relax.Binding) -> bool:
    """Tell whether a binding is a pure call of an operator, or only names values."""
    value = binding.value
    if type(binding) is not relax.VarBinding:
        return False
    if type(value) is relax.Call:
        return type(value.op) is Op and bool(value.op.get_attr("FPurity"))
    return type(value) in _NAMES


def _written_out(
    seq: relax.SeqExpr, callees: _Callees, moved: Collection[GlobalVar]
) -> relax.SeqExpr:
    bindings = []
    # An explicit stack, because the depth of calls may exceed Python's recursion limit.
    pending: list[tuple[GlobalVar | None, Iterator[relax.Binding]]] = [(None, _bindings(seq))]
    while pending:
        binding = next(pending[-1][1], None)
        if binding is None:
            pending.pop()
            continue
        value = binding.value
        if isinstance(value, relax.If):
            branches = (
                _written_out(b, callees, moved) for b in (value.true_branch, value.false_branch)
            )
            binding = with_value(binding, relax.If(value.cond, *branches, value.span))
        elif _calls_one_of(value, callees) and value.op not in [callee for callee, _ in pending]:
            body = _body_of(callees[value.op], binding, value.op not in moved)
            pending.append((value.op, body))
            continue
        bindings.append(binding)
    return relax.SeqExpr([relax.BindingBlock(bindings)], seq.body)


def _calls_one_of(value: relax.Expr, callees: _Callees) -> bool:
    return isinstance(value, relax.Call) and value.op in callees


def _body_of(
    callee: relax.Function, binding: relax.Binding, copied: bool
) -> Iterator[relax.Binding]:
    """Return the bindings that replace the binding of a call."""
    arguments = binding.value.args
    callee = with_shapes(callee, arguments, copied=copied)
    params = zip(callee.params, arguments, strict=True)
    return chain(
        (bound for param, argument in params for bound in bind_param(param, argument)),
        _bindings(callee.body),
        [with_value(binding, callee.body.body)],
    )


def _bindings(seq: relax.SeqExpr) -> Iterator[relax.Binding]:
    return (binding for block in seq.blocks[:] for binding in block.bindings[:])
