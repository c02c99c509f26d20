"""Inlining of calls of Relax functions."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import chain

import tvm
from tvm import relax
from tvm.ir import GlobalVar

from .arguments import bind_param, with_shapes
from .bindings import with_value
from .dataflow import in_dataflow
from .module import normalized

_Callees = Mapping[GlobalVar, relax.Function]


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
    return in_dataflow(
        relax.Function(
            function.params,
            normalized(function.params, body),
            function.ret_ty,
            function.is_pure,
            function.attrs,
            function.span,
        )
    )


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
