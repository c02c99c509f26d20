"""The bindings of a function: traversal, operands, and rewrites.

Loops over an array of TVM are over a slice of it, ``array[:]``. The slice is a list, which takes a
sixth of the time of the array's own iterator.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tvm import relax
from tvm.ir import PrimType


def with_function_body(
    function: relax.Function, body: relax.Expr, params: Sequence[relax.Var] | None = None
) -> relax.Function:
    """Return a function with another body, and other parameters if they are given."""
    params = function.params if params is None else params
    return relax.Function(
        params, body, function.ret_ty, function.is_pure, function.attrs, function.span
    )


def bindings_of(body: relax.Expr) -> Iterator[relax.Binding]:
    """Yield each binding of a body in order, as :func:`expanded` does."""
    if isinstance(body, relax.SeqExpr):
        for block in body.blocks[:]:
            yield from expanded(block.bindings[:])


def blocks_of(body: relax.Expr) -> Iterator[relax.BindingBlock]:
    """Yield each block of a body, and before it the blocks in the branches of its conditionals."""
    for block in body.blocks[:] if isinstance(body, relax.SeqExpr) else ():
        for binding in block.bindings[:]:
            if type(binding.value) is relax.If:
                yield from blocks_of(binding.value.true_branch)
                yield from blocks_of(binding.value.false_branch)
        yield block


def expanded(bindings: Iterable[relax.Binding]) -> Iterator[relax.Binding]:
    """Yield each binding in order. The bindings in the branches of a conditional come before its
    own binding."""
    for binding in bindings:
        value = binding.value
        if type(value) is relax.If:  # isinstance takes several times as long for a class of TVM
            yield from bindings_of(value.true_branch)
            yield from bindings_of(value.false_branch)
        yield binding


def used(value: relax.Expr) -> list[relax.Var]:
    """Return the variables that are operands of a value.

    For a conditional, these are the variables in the results of its branches; for a function, the
    captured variables.
    """
    used: list[relax.Var] = []
    _add_used(value, used)
    return used


def _add_used(value: relax.Expr, used: list[relax.Var]) -> None:
    kind = type(value)
    if kind is relax.DataflowVar or kind is relax.Var:
        used.append(value)
    elif kind is relax.Call:
        if isinstance(value.op, relax.Var):
            used.append(value.op)
        for argument in value.args[:]:
            _add_used(argument, used)
    elif kind is relax.Tuple:
        for field in value.fields[:]:
            _add_used(field, used)
    elif kind is relax.TupleGetItem:
        _add_used(value.tuple_value, used)
    elif kind is relax.SeqExpr:
        _add_used(value.body, used)
    elif kind is relax.If:
        _add_used(value.true_branch, used)
        _add_used(value.false_branch, used)
    elif kind is relax.Function:
        used.extend(relax.analysis.free_vars(value))


def with_value(binding: relax.Binding, value: relax.Expr) -> relax.Binding:
    """Return a binding of the same variable to another value; the same binding if the value is the
    same."""
    if value.same_as(binding.value):
        return binding
    if isinstance(binding, relax.MatchCast):
        return relax.MatchCast(binding.var, value, binding.ty)
    return relax.VarBinding(binding.var, value)


def renamed(binding: relax.Binding, names: dict[relax.Var, relax.Var]) -> relax.Binding:
    """Return a binding with renamed variables, also in its value."""
    variable, value = names.get(binding.var, binding.var), substitute(binding.value, names)
    if isinstance(binding, relax.MatchCast):
        return relax.MatchCast(variable, value, binding.ty)
    return relax.VarBinding(variable, value)


def substitute(value: relax.Expr, known: dict[relax.Var, relax.Expr]) -> relax.Expr:
    """Return a value with its variables replaced; the same value if none of them occurs."""
    if not known:
        return value
    if isinstance(value, relax.Var):
        return known.get(value, value)
    if not any(variable in known for variable in used(value)):
        return value
    if isinstance(value, relax.Call):
        arguments = [substitute(argument, known) for argument in value.args[:]]
        return relax.Call(value.op, arguments, value.attrs, value.ty_args, value.span)
    if isinstance(value, relax.Tuple):
        return relax.Tuple([substitute(field, known) for field in value.fields[:]], value.span)
    if isinstance(value, relax.TupleGetItem):
        return relax.TupleGetItem(substitute(value.tuple_value, known), value.index, value.span)
    return value


def without_unused(function: relax.Function) -> relax.Function:
    """Return a function without unused bindings, as ``relax.analysis.remove_all_unused`` does.

    That function takes linear time in the size of the function for each unused binding. Therefore
    most of them are removed here before it runs.
    """
    needed = set(relax.analysis.free_vars(function.body.body))
    blocks = []
    for block in reversed(function.body.blocks):
        kept = []
        for binding in reversed(block.bindings[:]):
            # A number may be used within a shape, which is not searched here.
            variable, value = binding.var, binding.value
            is_local = (
                type(binding) is relax.VarBinding
                and type(variable) is relax.DataflowVar
                and type(variable.ty) is not PrimType
            )
            if is_local and variable not in needed:
                continue
            is_nested = type(value) in (relax.If, relax.SeqExpr)
            needed.update(relax.analysis.free_vars(value) if is_nested else used(value))
            kept.append(binding)
        is_whole = len(kept) == len(block.bindings)
        blocks.append(block if is_whole else type(block)(kept[::-1], block.span))
    if not all(new is old for new, old in zip(blocks[::-1], function.body.blocks, strict=True)):
        function = with_function_body(function, relax.SeqExpr(blocks[::-1], function.body.body))
    return relax.analysis.remove_all_unused(function)


def element(expr: relax.Expr, index: int) -> relax.Expr:
    """Return an element of a tuple: the field itself if the expression is a literal tuple."""
    if isinstance(expr, relax.Tuple):
        return expr.fields[index]
    return relax.TupleGetItem(expr, index)
