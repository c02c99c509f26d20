"""Conditions of selections that TVM's simplifier visits once.

It simplifies the condition of a ``Select`` on its own, and again for each branch, which it
simplifies under that condition. A condition that contains another selection thus takes a multiple
of the time of that one, and the time doubles several times with each level: three levels take
minutes. A variable in place of such a condition takes none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from tvm import tirx
from tvm.ir import Call

from .blocks import allocating
from .compat import BufferLoad, SBlock, structural_map, structural_walk
from .expressions import substitute
from .module import IF_THEN_ELSE

#: Divisions of integers by 0 end the process.
_DIVISIONS = (tirx.Div, tirx.Mod, tirx.FloorDiv, tirx.FloorMod)

#: A condition, and the variable in its place.
Named: TypeAlias = "tuple[tirx.Var, tirx.PrimExpr]"


def with_named_conditions(
    expr: tirx.PrimExpr, is_named: Callable[[tirx.PrimExpr], bool] | None = None
) -> tuple[tirx.PrimExpr, list[Named]]:
    """Return an expression with variables in place of the conditions that contain selections.

    Parameters
    ----------
    expr : tirx.PrimExpr
        The expression.
    is_named : Callable, optional
        Tells whether a variable may replace a condition; by default it may.

    Returns
    -------
    expr : tirx.PrimExpr
        The expression with variables.
    named : list of (tirx.Var, tirx.PrimExpr)
        The variables and their conditions, which may contain the variables before them.
    """
    named: list[Named] = []

    def visit(node: tirx.Select) -> tirx.Select:
        condition = node.condition
        if not _contains(condition, tirx.Select) or not (is_named is None or is_named(condition)):
            return node
        variable = tirx.Var(f"condition_{len(named)}", str(condition.ty.dtype))
        named.append((variable, condition))
        return tirx.Select(variable, node.true_value, node.false_value)

    return structural_map(expr, (tirx.Select, visit), order="post"), named


def with_stored_conditions(body: tirx.Stmt) -> tirx.Stmt:
    """Return statements that store the conditions that contain selections, and load them where they
    are used; the same statements if there are none.

    The simplifier puts the value of a variable at its uses, but not the value in memory, which LLVM
    turns into a register. A ``Select`` computes its condition and both values, so that a condition
    may be computed before the statement. One within a branch of ``if_then_else`` is stored only if
    computing it has no effect: its loads may be out of bounds.
    """
    if not _is_nested(body):
        return body
    storing = _Storing()
    rules = [
        (tirx.BufferStore, storing.store),
        (tirx.Bind, storing.bind),
        (SBlock, storing.block),
    ]
    changed = structural_map(body, rules, order="post")
    if storing.made:
        return body  # only a block allocates buffers
    return substitute(changed, storing.loads) if storing.loads else changed


def _is_nested(body: tirx.Stmt) -> bool:
    """Tell whether statements have a condition that contains a selection, or may have one once the
    values of variables are put at their uses."""
    is_condition = any(
        _contains(bind.value, tirx.Select)
        for bind in _nodes(body, tirx.Bind)
        if str(bind.var.ty.dtype) == "bool"
    )
    selections = _nodes(body, tirx.Select)
    return is_condition or any(_contains(node.condition, tirx.Select) for node in selections)


class _Storing:
    """The change of statements.

    Attributes
    ----------
    made : list of tirx.Var
        The new buffers that no block allocates yet.
    loads : dict[tirx.Var, tirx.PrimExpr]
        The loads in place of variables whose values contain selections.
    """

    def __init__(self) -> None:
        self.made: list[tirx.Var] = []
        self.loads: dict[tirx.Var, tirx.PrimExpr] = {}

    def store(self, store: tirx.BufferStore) -> tirx.Stmt:
        """Return a store after the stores of its conditions."""
        if getattr(store, "predicate", None) is not None:
            return store
        before, value = self._changed(store.value)
        new = tirx.BufferStore(store.buffer, value, store.indices)
        return tirx.SeqStmt([*before, new]) if before else store

    def bind(self, bind: tirx.Bind) -> tirx.Stmt:
        """Return a store of the value after the stores of its conditions, if it has a selection."""
        before, value = self._changed(bind.value)
        if not _contains(value, tirx.Select):
            return bind
        store, self.loads[bind.var] = self._stored(value)
        return tirx.SeqStmt([*before, store]) if before else store

    def block(self, block: SBlock) -> SBlock:
        """Return a block that allocates the buffers made within it."""
        made, self.made = self.made, []
        return allocating(block, [*block.alloc_buffers, *made]) if made else block

    def _changed(self, value: tirx.PrimExpr) -> tuple[list[tirx.BufferStore], tirx.PrimExpr]:
        """Return the stores of conditions, and a value with their loads."""
        if not _contains(value, tirx.Select) or _contains(value, tirx.Let):
            return [], value
        in_branches = any(call.op.same_as(IF_THEN_ELSE) for call in _nodes(value, Call))
        value, named = with_named_conditions(value, _is_without_effect if in_branches else None)
        stores: list[tirx.BufferStore] = []
        loads: dict[tirx.Var, tirx.PrimExpr] = {}
        for variable, condition in named:
            store, loads[variable] = self._stored(substitute(condition, loads))
            stores.append(store)
        return stores, substitute(value, loads)

    def _stored(self, value: tirx.PrimExpr) -> tuple[tirx.BufferStore, tirx.PrimExpr]:
        """Return the store of a value in a new buffer, and its load."""
        buffer = tirx.decl_buffer((1,), str(value.ty.dtype), "selected", layout=None)
        self.made.append(buffer)
        indices = [tirx.IntImm("int32", 0)]
        return tirx.BufferStore(buffer, value, indices), tirx.BufferLoad(buffer, indices)


def _is_without_effect(condition: tirx.PrimExpr) -> bool:
    return not _contains(condition, (BufferLoad, Call, *_DIVISIONS))


def _contains(expr: tirx.PrimExpr, kinds: type | tuple[type, ...]) -> bool:
    return len(_nodes(expr, kinds)) > 0


def _nodes(expr: tirx.PrimExpr, kinds: type | tuple[type, ...]) -> list:
    found: list = []
    structural_walk(expr, (kinds, found.append))
    return found
