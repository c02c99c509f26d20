"""Tensor functions as loop programs: loops, conditions, bindings and stores, without blocks.

A block is a claim of its author about the loops around it, which schedules trust. A derivative must
not: a loop program has only the statements and their order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

import tvm_ffi
from tvm import tirx
from tvm.ir import Call

from ..errors import GradientError
from ..ir.compat import SBlock, SBlockRealize
from ..ir.expressions import substitute
from ..ir.loops import with_canonical_loops
from ..ir.module import is_buffer
from .scalars import with_bindings
from .statements import (
    Bind,
    If,
    Loop,
    Statement,
    Store,
    dtype_of,
    is_number,
    is_true,
    new_buffer,
    stores,
)


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
    function = with_canonical_loops(function)
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
        parts: list[tuple[tirx.Stmt, str]] = []
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
        has_own = len(self.allocated) > known
        statements, scalars = with_bindings(statements, self.allocated[known:])
        self.allocated = [buffer for buffer in self.allocated if buffer not in scalars]
        if any(isinstance(statement, Bind) for statement in statements):
            statements = (If(tirx.const(True, "bool"), statements),)
        for statement in statements:
            # A sequence within one source statement has no separate source. Nor has a block with
            # local buffers: they become buffers of the function, and the source would define
            # them again.
            is_whole = len(statements) == 1 and not has_own
            yield Part(statement, source if is_whole else None, self._name)

    def refuse_views(self, block: SBlock) -> None:
        if block.match_buffers:
            raise unsupported(block.name_hint, "a match_buffer aliases another buffer")

    def _statements(self, stmt: tirx.Stmt, values: Mapping) -> tuple:
        if isinstance(stmt, tirx.SeqStmt):
            return tuple(
                statement for part in stmt.seq for statement in self._statements(part, values)
            )
        kind = type(stmt).__name__
        if kind not in _CONVERSIONS:
            raise unsupported(self._name, f"{kind} has no derivative")
        return _CONVERSIONS[kind](self, stmt, values)

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

    def _block(self, stmt: SBlockRealize, values: Mapping) -> tuple:
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

    def _store(self, stmt: tirx.BufferStore, values: Mapping) -> tuple:
        if getattr(stmt, "predicate", None) is not None:
            raise unsupported(self._name, "a store with a predicate has no derivative")
        indices = tuple(_without_lets(substitute(index, values)) for index in stmt.indices)
        bound, value = _named(substitute(stmt.value, values))
        return (*bound, Store(stmt.buffer, indices, value))

    def _if(self, stmt: tirx.IfThenElse, values: Mapping) -> tuple:
        body = self._statements(stmt.then_case, values)
        otherwise = () if stmt.else_case is None else self._statements(stmt.else_case, values)
        return (If(_without_lets(substitute(stmt.condition, values)), body, otherwise),)

    def _bind(self, stmt: tirx.Stmt, values: Mapping) -> tuple:
        bound, value = _named(substitute(stmt.value, values))
        return (*bound, Bind(stmt.var, value))

    def _allocate(self, stmt: tirx.Stmt, values: Mapping) -> tuple:
        self.allocated.append(stmt.buffer)
        return ()

    def _attribute(self, stmt: tirx.Stmt, values: Mapping) -> tuple:
        return self._statements(stmt.body, values)

    def _assert(self, stmt: tirx.Stmt, values: Mapping) -> tuple:
        return ()

    def _evaluate(self, stmt: tirx.Evaluate, values: Mapping) -> tuple:
        if isinstance(stmt.value, Call):
            raise unsupported(self._name, f"the call {stmt.value} has effects, and no derivative")
        return ()

    def _while(self, stmt: tirx.Stmt, values: Mapping) -> tuple:
        raise unsupported(
            self._name, "the number of iterations of a while loop depends on data, and is not saved"
        )


#: The methods that convert statements, by the names of their types, as not all versions of TVM have
#: all of these types.
_CONVERSIONS: dict[str, Callable[[_Parser, tirx.Stmt, Mapping], tuple]] = {
    "AllocBuffer": _Parser._allocate,
    "AssertStmt": _Parser._assert,
    "AttrStmt": _Parser._attribute,
    "Bind": _Parser._bind,
    "BufferStore": _Parser._store,
    "Evaluate": _Parser._evaluate,
    "For": _Parser._for,
    "IfThenElse": _Parser._if,
    "SBlockRealize": _Parser._block,
    "While": _Parser._while,
}


def _without_lets(expr: tirx.PrimExpr) -> tirx.PrimExpr:
    """Return an expression with the value of each ``Let`` instead of its variable.

    A derivative repeats parts of an expression, and takes indices out of it; both would leave the
    scope of a variable.
    """
    if not _has_lets(expr):
        return expr

    def inlined(let: tirx.Let) -> tirx.PrimExpr:
        return substitute(let.body, {let.var: let.value})

    return tvm_ffi.structural_map(expr, (tirx.Let, inlined), order="post")


def _has_lets(expr: tirx.PrimExpr) -> bool:
    lets: list[tirx.Let] = []
    tvm_ffi.structural_walk(expr, (tirx.Let, lets.append))
    return bool(lets)


def _named(expr: tirx.PrimExpr) -> tuple[list[Bind], tirx.PrimExpr]:
    """Return the outer ``Let`` expressions of a value as bindings, and the value without any."""
    binds: list[Bind] = []
    names: dict[tirx.Var, tirx.Var] = {}
    while isinstance(expr, tirx.Let):
        var = tirx.Var(expr.var.name, expr.var.ty.dtype)
        binds.append(Bind(var, _without_lets(substitute(expr.value, names))))
        names[expr.var] = var
        expr = expr.body
    return binds, _without_lets(substitute(expr, names))
