"""Values of stores in which large expressions occur several times: bound to variables once.

The derivative of a nested function repeats the function at each level. As a tree it grows with the
cube of the depth, and the derivative of that tree faster still.
"""

from __future__ import annotations

from collections.abc import Hashable

from tvm import tirx
from tvm.ir import Call

from ..ir.compat import BufferLoad, loaded_buffer, structural_map
from .statements import dtype_of, is_float, op_name

#: Nodes of a value above which its repeated parts are bound. Schedules vectorize a single store.
_LARGE = 250

_OPERANDS = ("a", "b", "condition", "true_value", "false_value", "value")


def with_shared_values(body: tirx.Stmt) -> tirx.Stmt:
    """Return statements in which the repeated parts of large values are bound before a store.

    A part is bound if it is computed whenever the store is: the value of a branch is not.
    """
    return structural_map(body, (tirx.BufferStore, _shared), order="post")


def _shared(store: tirx.BufferStore) -> tirx.Stmt:
    if getattr(store, "predicate", None) is not None:
        return store
    graph = _Graph()
    root = graph.number(store.value)
    if graph.sizes[root] <= max(_LARGE, 2 * len(graph.nodes)):
        return store
    binds = graph.bound(root)
    value = graph.rebuilt(root)
    if not binds:
        return store
    made = [tirx.Bind(var, graph.values[number]) for number, var in binds]
    return tirx.SeqStmt([*made, tirx.BufferStore(store.buffer, value, store.indices)])


class _Graph:
    """The different nodes of an expression, by their numbers.

    Attributes
    ----------
    nodes : list
        An expression for each number; operands have smaller numbers.
    sizes : list[int]
        The nodes of each expression as a tree.
    """

    def __init__(self) -> None:
        self.nodes: list[tirx.PrimExpr] = []
        self.sizes: list[int] = []
        self.values: dict[int, tirx.PrimExpr] = {}
        self._operands: list[list[int]] = []
        self._lazy: list[int] = []
        self._numbers: dict[Hashable, int] = {}
        self._known: dict[int, int] = {}
        self._variables: dict[int, tirx.Var] = {}
        self._made: dict[int, tirx.PrimExpr] = {}

    def number(self, expr: tirx.PrimExpr) -> int:
        """Return the number of an expression; equal expressions have the same one."""
        address = expr.__chandle__()
        if address in self._known:
            return self._known[address]
        operands = _operands(expr)
        numbers = [self.number(operand) for operand in operands]
        key = (*_kind(expr), *numbers)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.nodes)
            self.nodes.append(expr)
            self.sizes.append(1 + sum(self.sizes[i] for i in numbers))
            self._operands.append(numbers)
            is_choice = isinstance(expr, tirx.Select) or _is_conditional(expr)
            self._lazy.append(1 if is_choice else len(numbers))
        self._known[address] = number
        return number

    def bound(self, root: int) -> list[tuple[int, tirx.Var]]:
        """Return the numbers of the parts to bind in order, each with its variable."""
        uses, is_computed = [0] * len(self.nodes), [False] * len(self.nodes)
        is_computed[root] = True
        for number in range(root, -1, -1):
            for place, operand in enumerate(self._operands[number]):
                uses[operand] += 1
                is_computed[operand] |= is_computed[number] and place < self._lazy[number]
        chosen = [
            number
            for number in range(root)
            if uses[number] > 1
            and is_computed[number]
            and self.sizes[number] > 3
            and is_float(dtype_of(self.nodes[number]))
        ]
        for number in chosen:
            self.rebuilt(number)
            self.values[number] = self._made[number]
            self._made[number] = self._variables[number] = tirx.Var(
                "part", dtype_of(self.nodes[number])
            )
        return [(number, self._variables[number]) for number in chosen]

    def rebuilt(self, number: int) -> tirx.PrimExpr:
        """Return an expression with variables in place of its bound parts."""
        if number not in self._made:
            operands = [self.rebuilt(operand) for operand in self._operands[number]]
            self._made[number] = _with_operands(self.nodes[number], operands)
        return self._made[number]


def _is_conditional(expr) -> bool:
    return isinstance(expr, Call) and op_name(expr) == "if_then_else"


def _operands(expr) -> list:
    if isinstance(expr, Call):
        return [argument for argument in expr.args if isinstance(argument, tirx.Expr)]
    if isinstance(expr, BufferLoad):
        return list(expr.indices)
    found = [getattr(expr, name, None) for name in _OPERANDS]
    return [operand for operand in found if isinstance(operand, tirx.Expr)]


def _kind(expr) -> tuple:
    """Return what distinguishes an expression from others with the same operands."""
    name, dtype = type(expr).__name__, dtype_of(expr)
    if isinstance(expr, tirx.Var):
        return name, expr
    if isinstance(expr, (tirx.IntImm, tirx.FloatImm)):
        return name, dtype, str(expr.value)
    if isinstance(expr, BufferLoad):
        return name, loaded_buffer(expr)
    if isinstance(expr, Call):
        return name, dtype, expr.op, len(expr.args)
    return name, dtype


def _with_operands(expr, operands: list):
    """Return an expression with other operands."""
    if all(a.same_as(b) for a, b in zip(operands, _operands(expr), strict=True)):
        return expr
    if isinstance(expr, BufferLoad):
        return tirx.BufferLoad(loaded_buffer(expr), operands)
    if isinstance(expr, Call):
        rest = iter(operands)
        args = [next(rest) if isinstance(old, tirx.Expr) else old for old in expr.args]
        return tirx.call_intrin(dtype_of(expr), expr.op, *args)
    if isinstance(expr, tirx.Cast):
        return tirx.Cast(dtype_of(expr), *operands)
    return type(expr)(*operands)
