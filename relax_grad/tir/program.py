"""Tensor functions as loop programs: loops, conditions, bindings and stores, without blocks.

A block is a claim of its author about the loops around it, which schedules trust. A derivative must
not: a loop program has only the statements and their order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce

import tvm_ffi
from tvm import tirx
from tvm.ir import Call, Op

from ..errors import GradientError
from ..ir.compat import SBlockRealize, loaded_buffer
from ..ir.expressions import loads, substitute
from ..ir.module import is_buffer


@dataclass(frozen=True)
class Bind:
    """A variable and its value, which the following statements of the list may use."""

    var: tirx.Var
    value: tirx.PrimExpr


@dataclass(frozen=True)
class Store:
    """``buffer[indices] = value``."""

    buffer: tirx.Var
    indices: tuple[tirx.PrimExpr, ...]
    value: tirx.PrimExpr


@dataclass(frozen=True)
class If:
    """A conditional.

    Attributes
    ----------
    condition : tirx.PrimExpr
        The condition.
    body, otherwise : tuple[Statement, ...]
        The statements of both branches.
    is_init : bool
        Whether it initialises a reduction: the condition holds in the first iteration of some loops
        only.
    """

    condition: tirx.PrimExpr
    body: tuple
    otherwise: tuple = ()
    is_init: bool = False


@dataclass(frozen=True)
class Loop:
    """A serial loop over ``range(start, start + extent)``."""

    var: tirx.Var
    start: tirx.PrimExpr
    extent: tirx.PrimExpr
    body: tuple


Statement = Bind | Store | If | Loop

_ORDERED = (tirx.LT, tirx.LE, tirx.GT, tirx.GE)


@dataclass(frozen=True)
class Part:
    """A statement of the outermost list.

    Attributes
    ----------
    statement : Statement
        The statement as a loop program.
    source : tirx.Stmt
        The statement of the function, with its blocks.
    name : str
        The name of the first block, for errors.
    """

    statement: Statement
    source: tirx.Stmt | None
    name: str


@dataclass(frozen=True)
class Program:
    """A loop program.

    Attributes
    ----------
    inputs, outputs : list[tirx.Var]
        The buffers and numbers that the function takes, and the buffers that it writes to.
    allocated : list[tirx.Var]
        The buffers that the function allocates.
    parts : list[Part]
        The statements in order.
    """

    inputs: list[tirx.Var]
    outputs: list[tirx.Var]
    allocated: list[tirx.Var]
    parts: list[Part] = field(default_factory=list)


def unsupported(name: str, what: str) -> GradientError:
    """Return the error for a part of a function without a derivative."""
    where = f"block {name!r}: " if name else ""
    return GradientError(f"{where}{what}")


def parse(
    function: tirx.PrimFunc,
    num_outputs: int | None = None,
    inplace: Sequence[int] | None = None,
) -> Program:
    """Return a function as a loop program.

    Parameters
    ----------
    function : tirx.PrimFunc
        The function.
    num_outputs : int, optional
        The number of buffers at the end that are results; by default those that the function writes
        to.
    inplace : Sequence[int], optional
        For each result the index of the buffer that it is written to, or -1 for a buffer at the
        end. A buffer that is overwritten counts as an input and as an output; the program copies it
        first.

    Raises
    ------
    GradientError
        If a statement has no derivative: a while loop, a loop that is bound to threads, an external
        call, a buffer that aliases another one. The error names the block.
    """
    buffers = [param for param in function.params if is_buffer(param)]
    if inplace is not None:
        num_outputs = sum(index < 0 for index in inplace)
    overwritten = {
        old: new_buffer(old.shape, dtype_of(old), f"{old.name}_new")
        for old in (function.params[index] for index in inplace or () if index >= 0)
    }
    parser = _Parser()
    parts = [_copied(old, new) for old, new in overwritten.items()]
    body = substitute(function.body, overwritten)
    parts += [part for group in _parts_of(body, parser) for part in parser.parts(*group)]
    written = {store.buffer for part in parts for store in stores([part.statement])}
    if num_outputs is None:
        outputs = [buffer for buffer in buffers if buffer in written]
    else:
        outputs = buffers[len(buffers) - num_outputs :]
    inputs = [param for param in function.params if param not in outputs]
    changed = [param for param in inputs if param in written]
    if changed:
        raise GradientError(
            f"the function writes to its argument {changed[0].name!r}, which is no result of it"
        )
    if inplace is not None:
        last = iter(outputs)
        outputs = [overwritten[function.params[i]] if i >= 0 else next(last) for i in inplace]
    return Program(inputs, outputs, parser.allocated, parts)


def _copied(source: tirx.Var, target: tirx.Var) -> Part:
    """Return the copy of a buffer."""
    loops = [
        (tirx.Var(f"i{axis}", extent.ty.dtype), extent) for axis, extent in enumerate(source.shape)
    ]
    indices = tuple(var for var, _ in loops)
    statement: Statement = Store(target, indices, tirx.BufferLoad(source, list(indices)))
    for var, extent in reversed(loops):
        statement = Loop(var, tirx.IntImm(str(var.ty.dtype), 0), extent, (statement,))
    return Part(statement, None, f"{source.name}_copy")


def _parts_of(body: tirx.Stmt, parser: _Parser, name: str = "") -> list[tuple[tirx.Stmt, str]]:
    """Return the statements of the root block, or of the body, each with the name of a block around
    it."""
    is_plain = isinstance(body, SBlockRealize) and not body.iter_values and body.block.init is None
    if is_plain and is_true(body.predicate):
        parser.refuse_views(body.block)
        parser.allocated += list(body.block.alloc_buffers)
        own = name if body.block.name_hint == "root" else body.block.name_hint
        return _parts_of(body.block.body, parser, own)
    if isinstance(body, tirx.SeqStmt):
        parts = []
        for i, part in enumerate(body.seq):
            if _has_binding(part):
                # The statements after a binding use it: they stay together.
                return [*parts, (tirx.SeqStmt(list(body.seq)[i:]), name)]
            parts += _parts_of(part, parser, name)
        return parts
    return [(body, name)]


def _has_binding(stmt: tirx.Stmt) -> bool:
    """Tell whether a statement binds a variable that the statements after it may use."""
    if isinstance(stmt, tirx.SeqStmt):
        return any(map(_has_binding, stmt.seq))
    return isinstance(stmt, tirx.Bind)


class _Parser:
    """The conversion of statements. Variables of blocks are replaced by their values."""

    def __init__(self) -> None:
        self.allocated: list[tirx.Var] = []
        self._name = ""

    def parts(self, source: tirx.Stmt, name: str) -> Iterator[Part]:
        """Yield the parts of one statement of the function, within a block of this name."""
        self._name, known = name, len(self.allocated)
        statements = self._statements(source, {})
        if any(isinstance(statement, Bind) for statement in statements):
            statements = (If(tirx.const(True, "bool"), statements),)
        for statement in statements:
            # A sequence within one source statement has no source of its own. Nor has a block with
            # buffers of its own: they become buffers of the function, and the source would define
            # them again.
            is_whole = len(statements) == 1 and len(self.allocated) == known
            yield Part(statement, source if is_whole else None, self._name)

    def refuse_views(self, block) -> None:
        if block.match_buffers:
            raise unsupported(block.name_hint, "a match_buffer aliases another buffer")

    def _statements(self, stmt: tirx.Stmt, values: Mapping) -> tuple:
        if isinstance(stmt, tirx.SeqStmt):
            return tuple(
                statement for part in stmt.seq for statement in self._statements(part, values)
            )
        convert = getattr(self, f"_{type(stmt).__name__.lower()}", None)
        if convert is None:
            raise unsupported(self._name, f"{type(stmt).__name__} has no derivative")
        return convert(stmt, values)

    def _for(self, stmt: tirx.For, values: Mapping) -> tuple:
        if stmt.thread_binding is not None:
            raise unsupported(self._name, f"the loop {stmt.loop_var.name} is bound to threads")
        step = getattr(stmt, "step", None)
        if step is not None and not is_number(step, 1):
            raise unsupported(self._name, f"the loop {stmt.loop_var.name} has the step {step}")
        # A second visit of the same statement must not share variables with the first.
        var = tirx.Var(stmt.loop_var.name, stmt.loop_var.ty.dtype)
        start, extent = (_without_lets(substitute(e, values)) for e in (stmt.min, stmt.extent))
        body = self._statements(stmt.body, {**values, stmt.loop_var: var})
        return (Loop(var, start, extent, body),) if body else ()

    def _sblockrealize(self, stmt, values: Mapping) -> tuple:
        block = stmt.block
        self._name = self._name or block.name_hint
        self.refuse_views(block)
        self.allocated += list(block.alloc_buffers)
        inner, first = dict(values), []
        for axis, value in zip(block.iter_vars, stmt.iter_values, strict=True):
            value = _without_lets(substitute(value, values))
            inner[axis.var] = value
            if axis.iter_type == tirx.IterVar.CommReduce:
                start = substitute(axis.dom.min, values)
                # TVM takes the smallest value of the binding for the first iteration.
                first.append(value == start)
        body = self._statements(block.body, inner)
        if block.init is not None:
            init = self._statements(block.init, inner)
            is_first = reduce(tirx.And, first) if first else tirx.const(True, "bool")
            body = (If(is_first, init, is_init=True) if first else If(is_first, init), *body)
        predicate = _without_lets(substitute(stmt.predicate, values))
        return body if is_true(predicate) else (If(predicate, body),)

    def _bufferstore(self, stmt: tirx.BufferStore, values: Mapping) -> tuple:
        if getattr(stmt, "predicate", None) is not None:
            raise unsupported(self._name, "a store with a predicate has no derivative")
        indices = tuple(_without_lets(substitute(index, values)) for index in stmt.indices)
        bound, value = _named(substitute(stmt.value, values))
        return (*bound, Store(stmt.buffer, indices, value))

    def _ifthenelse(self, stmt: tirx.IfThenElse, values: Mapping) -> tuple:
        body = self._statements(stmt.then_case, values)
        otherwise = () if stmt.else_case is None else self._statements(stmt.else_case, values)
        return (If(_without_lets(substitute(stmt.condition, values)), body, otherwise),)

    def _bind(self, stmt, values: Mapping) -> tuple:
        bound, value = _named(substitute(stmt.value, values))
        return (*bound, Bind(stmt.var, value))

    def _allocbuffer(self, stmt, values: Mapping) -> tuple:
        self.allocated.append(stmt.buffer)
        return ()

    def _attrstmt(self, stmt, values: Mapping) -> tuple:
        return self._statements(stmt.body, values)

    def _assertstmt(self, stmt, values: Mapping) -> tuple:
        return ()

    def _evaluate(self, stmt: tirx.Evaluate, values: Mapping) -> tuple:
        if isinstance(stmt.value, Call):
            raise unsupported(self._name, f"the call {stmt.value} has effects, and no derivative")
        return ()

    def _while(self, stmt, values: Mapping) -> tuple:
        raise unsupported(
            self._name, "the number of iterations of a while loop depends on data, and is not saved"
        )


def _without_lets(expr: tirx.PrimExpr) -> tirx.PrimExpr:
    """Return an expression with the value of each ``Let`` in the place of its variable.

    A derivative repeats parts of an expression, and takes indices out of it; both would leave the
    scope of a variable.
    """
    if not _has_lets(expr):
        return expr

    def inlined(let):
        return substitute(let.body, {let.var: let.value})

    return tvm_ffi.structural_map(expr, (tirx.Let, inlined), order="post")


def _has_lets(expr) -> bool:
    lets = []
    tvm_ffi.structural_walk(expr, (tirx.Let, lets.append))
    return bool(lets)


def _named(expr: tirx.PrimExpr) -> tuple[list[Bind], tirx.PrimExpr]:
    """Return the outer ``Let`` expressions of a value as bindings, and the value without any."""
    binds, names = [], {}
    while isinstance(expr, tirx.Let):
        var = tirx.Var(expr.var.name, expr.var.ty.dtype)
        binds.append(Bind(var, _without_lets(substitute(expr.value, names))))
        names[expr.var] = var
        expr = expr.body
    return binds, _without_lets(substitute(expr, names))


def walk(statements: Iterable[Statement]) -> Iterator[Statement]:
    """Yield each statement, and those within it."""
    for statement in statements:
        yield statement
        if isinstance(statement, (Loop, If)):
            yield from walk(statement.body)
        if isinstance(statement, If):
            yield from walk(statement.otherwise)


def stores(statements: Iterable[Statement]) -> list[Store]:
    """Return the stores within statements."""
    return [statement for statement in walk(statements) if isinstance(statement, Store)]


def expressions(statement: Statement) -> Iterator[tirx.PrimExpr]:
    """Yield the expressions of a statement, without those of the statements within it."""
    if isinstance(statement, Store):
        yield from (*statement.indices, statement.value)
    elif isinstance(statement, Bind):
        yield statement.value
    elif isinstance(statement, If):
        yield statement.condition
    else:
        yield from (statement.start, statement.extent)


def reads(statements: Iterable[Statement]) -> set[tirx.Var]:
    """Return the buffers that statements read."""
    return {
        loaded_buffer(load)
        for statement in walk(statements)
        for expr in expressions(statement)
        for load in loads(expr)
    }


def mapped(statement: Statement, change: Callable[[tirx.PrimExpr], tirx.PrimExpr]) -> Statement:
    """Return a statement with a function applied to all expressions."""
    if isinstance(statement, Store):
        indices = tuple(map(change, statement.indices))
        return Store(statement.buffer, indices, change(statement.value))
    if isinstance(statement, Bind):
        return Bind(statement.var, change(statement.value))
    body = tuple(mapped(inner, change) for inner in statement.body)
    if isinstance(statement, If):
        otherwise = tuple(mapped(inner, change) for inner in statement.otherwise)
        return replace(
            statement, condition=change(statement.condition), body=body, otherwise=otherwise
        )
    return Loop(statement.var, change(statement.start), change(statement.extent), body)


def backwards(loop: Loop) -> Loop:
    """Return a loop that runs from the last iteration to the first."""
    var = tirx.Var(f"{loop.var.name}_back", loop.var.ty.dtype)
    dtype = str(var.ty.dtype)
    one = tirx.IntImm(dtype, 1)
    value = cast(loop.start, dtype) + (cast(loop.extent, dtype) - one - var)
    body = [mapped(inner, lambda e: substitute(e, {loop.var: value})) for inner in loop.body]
    return Loop(var, tirx.IntImm(dtype, 0), loop.extent, tuple(body))


# Expressions


def is_number(expr: tirx.PrimExpr, number: int) -> bool:
    """Tell whether an expression is an integer constant with this value."""
    return isinstance(expr, tirx.IntImm) and int(expr) == number


def is_true(expr: tirx.PrimExpr) -> bool:
    """Tell whether a condition is the constant True."""
    return isinstance(expr, tirx.IntImm) and bool(int(expr))


def dtype_of(expr: tirx.PrimExpr) -> str:
    """Return the dtype of an expression or a buffer."""
    return str(expr.dtype) if is_buffer_var(expr) else str(expr.ty.dtype)


def is_buffer_var(expr: object) -> bool:
    """Tell whether an expression is a buffer."""
    return isinstance(expr, tirx.Var) and is_buffer(expr)


def is_float(dtype: str) -> bool:
    """Tell whether a dtype is one of floating-point numbers that have gradients."""
    return dtype.startswith(("float", "bfloat")) and not dtype.startswith("float8")


def op_name(call: Call) -> str:
    """Return the name of the function that an expression calls, without its namespace."""
    return call.op.name.rpartition(".")[2] if isinstance(call.op, Op) else str(call.op)


def conjunction(conditions: Sequence[tirx.PrimExpr]) -> tirx.PrimExpr:
    """Return the conjunction of conditions without loads."""
    return reduce(tirx.And, conditions)


def has_gradient(param: tirx.Var) -> bool:
    """Tell whether a parameter is a buffer of floating-point numbers."""
    return is_buffer(param) and is_float(dtype_of(param))


def negated(condition: tirx.PrimExpr) -> tirx.PrimExpr:
    """Return the negation of a condition.

    TVM takes ``not a < b`` for ``b <= a``, which differs for NaN. It leaves a selection alone.
    """
    compared: list[tirx.PrimExpr] = []
    tvm_ffi.structural_walk(condition, (_ORDERED, compared.append))
    if not any(is_float(dtype_of(node.a)) for node in compared):
        return tirx.Not(condition)
    return tirx.Select(condition, tirx.const(False, "bool"), tirx.const(True, "bool"))


def guarded(guards: Sequence[tirx.PrimExpr], statement: Statement) -> Statement:
    """Return a statement under conditions, each of which may be evaluated only if those before it
    hold."""
    for guard in reversed(guards):
        statement = If(guard, (statement,))
    return statement


def bounds_of_data(buffer: tirx.Var, indices: Sequence[tirx.PrimExpr]) -> list[tirx.PrimExpr]:
    """Return the conditions under which indices that depend on data are in bounds."""
    bounds = []
    for index, extent in zip(indices, buffer.shape, strict=True):
        if loads(index):
            dtype = dtype_of(index)
            bounds.append(tirx.And(index >= tirx.IntImm(dtype, 0), index < cast(extent, dtype)))
    return bounds


def cast(expr: tirx.PrimExpr, dtype: str) -> tirx.PrimExpr:
    """Return an expression in a dtype."""
    if dtype_of(expr) == dtype:
        return expr
    return tirx.IntImm(dtype, int(expr)) if is_integer(expr, dtype) else tirx.Cast(dtype, expr)


def is_integer(expr: tirx.PrimExpr, dtype: str) -> bool:
    """Tell whether an expression is an integer constant, and a dtype one of integers."""
    return isinstance(expr, tirx.IntImm) and dtype.startswith("int")


def new_buffer(shape: Sequence, dtype: str, name: str) -> tirx.Var:
    """Return a new buffer in row-major order."""
    return tirx.decl_buffer(list(shape), dtype, name, layout=None)
