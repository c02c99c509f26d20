"""Values of stores in which large expressions occur several times: stored and loaded.

The derivative of a nested function repeats the function at each level. As a tree it grows with the
cube of the depth, and the derivative of that tree faster still. TVM's ``LowerIntrin`` copies the
argument of some functions: nested calls of ``tanh`` take five times the code at each level.

The parts go through memory, which LLVM turns into registers: TVM's code generator puts the value of
a variable at each of its uses, to simplify them.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import tvm
from tvm import tirx
from tvm.ir import Call, Op

from .blocks import allocating
from .compat import BufferLoad, SBlock, loaded_buffer, structural_map, structural_walk
from .conditions import with_stored_conditions
from .expressions import substitute
from .module import IF_THEN_ELSE, is_buffer, with_body, with_changed_functions

#: Nodes of a value above which its repeated parts are stored. Schedules vectorize a single store.
_LARGE = 250

#: Nodes of a value above which it is stored in place of a binding.
_LARGE_VARIABLE = 50

#: The name of the buffers that hold parts.
PART = "part"

#: Their memory: a register of a thread on a GPU.
_LOCAL = "local"

#: How often ``LowerIntrin`` copies the argument of functions, if more than once.
_COPIES = {"tirx.tanh": 5, "tirx.tan": 2, "tirx.atanh": 2}

#: The calls of such functions from which a function is searched for nested ones.
_NESTED = 3

_BINARY = (
    *(tirx.Add, tirx.Sub, tirx.Mul, tirx.Min, tirx.Max, tirx.And, tirx.Or),
    *(tirx.EQ, tirx.NE, tirx.LT, tirx.LE, tirx.GT, tirx.GE),
)

_DIVISIONS = (tirx.Div, tirx.Mod, tirx.FloorDiv, tirx.FloorMod)

#: The operands of each kind of expression besides calls and loads. Those of others, such as vectors
#: of indices, stay as they are.
_OPERANDS = {
    **dict.fromkeys((*_BINARY, *_DIVISIONS), ("a", "b")),
    tirx.Not: ("a",),
    tirx.Select: ("condition", "true_value", "false_value"),
    tirx.Cast: ("value",),
}

#: TVM's number of the effect of a function that only computes.
_PURE = 1

_LEAVES = (tirx.Var, tirx.IntImm, tirx.FloatImm)


def share_values(mod: tvm.IRModule) -> tvm.IRModule:
    """Return a module whose tensor functions store the repeated parts of large values; the same
    module if they have none."""
    return with_changed_functions(
        mod,
        tirx.PrimFunc,
        lambda function: with_body(function, with_shared_values(function.body)),
    )


def with_shared_arguments(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return a function for a CPU that stores on the stack what TVM copies, or simplifies again and
    again: the arguments of nested functions, conditions that contain selections, and what
    :func:`share_values` stores."""
    calls: list[Call] = []
    structural_walk(function.body, (Call, calls.append))
    is_nested = sum(_copies(call) > 1 for call in calls) >= _NESTED
    body = with_stored_conditions(function.body)
    if is_nested or not body.same_as(function.body):
        body = with_shared_values(body)
    buffers: dict[tirx.Var, tirx.Var] = {}
    structural_walk(body, (SBlock, lambda block: buffers.update(map(_on_stack, _parts_of(block)))))
    if buffers:
        body = structural_map(body, (SBlock, lambda block: _allocating(block, buffers)))
        body = substitute(body, buffers)
    return with_body(function, body)


def _parts_of(block: SBlock) -> list[tirx.Var]:
    """Return the buffers of parts that a block allocates for any target."""
    return [b for b in block.alloc_buffers if b.name == PART and b.scope() == _LOCAL]


def _on_stack(buffer: tirx.Var) -> tuple[tirx.Var, tirx.Var]:
    """Return a buffer, and another one for its use on a CPU, where TVM allocates local memory by a
    call."""
    return buffer, tirx.decl_buffer(buffer.shape, _dtype_of(buffer), PART, layout=None)


def _allocating(block: SBlock, buffers: Mapping[tirx.Var, tirx.Var]) -> SBlock:
    own = [buffers.get(buffer, buffer) for buffer in block.alloc_buffers]
    return allocating(block, own) if _parts_of(block) else block


def with_shared_values(body: tirx.Stmt) -> tirx.Stmt:
    """Return statements in which the repeated parts of large values are stored before they are
    used.

    A part is computed before the store of the value if it is computed whenever the store is, or if
    computing it has no effect: a branch whose loads may be out of bounds stays as it is. The block
    around the store allocates memory for it; there must be one.
    """
    sharing = _Sharing()
    rules = [
        (tirx.BufferStore, sharing.store),
        (tirx.Bind, sharing.bind),
        (SBlock, sharing.block),
    ]
    changed = structural_map(body, rules, order="post")
    if sharing.made:
        return body  # only a block allocates buffers
    return substitute(changed, sharing.loads) if sharing.loads else changed


class _Sharing:
    """The change of statements.

    Attributes
    ----------
    made : list[tirx.Var]
        The new buffers that no block allocates yet.
    loads : dict[tirx.Var, tirx.PrimExpr]
        The loads that take the place of variables with large values.
    """

    def __init__(self) -> None:
        self.made: list[tirx.Var] = []
        self.loads: dict[tirx.Var, tirx.PrimExpr] = {}
        self._sizes: dict[tirx.Var, int] = {}

    def store(self, statement: tirx.BufferStore) -> tirx.Stmt:
        """Return a store after the stores of its parts."""
        if _has_predicate(statement):
            return statement
        before, value = self._parts(statement.value)
        if not before:
            return statement
        return tirx.SeqStmt([*before, tirx.BufferStore(statement.buffer, value, statement.indices)])

    def bind(self, statement: tirx.Bind) -> tirx.Stmt:
        """Return a binding after the stores of its parts, or a store of the whole value."""
        if not _has_numbers(statement.value):
            return statement
        before, value = self._parts(statement.value)
        graph = _Graph(self._sizes)
        size = graph.sizes[graph.number(value)]
        if size > _LARGE_VARIABLE:
            own = _stored(value)
            self.made.append(own.buffer)
            self.loads[statement.var] = tirx.BufferLoad(own.buffer, own.indices)
            return tirx.SeqStmt([*before, own]) if before else own
        self._sizes[statement.var] = size
        return tirx.SeqStmt([*before, tirx.Bind(statement.var, value)]) if before else statement

    def block(self, block: SBlock) -> SBlock:
        """Return a block that allocates the buffers made within it."""
        if not self.made:
            return block
        made, self.made = self.made, []
        return allocating(block, [*block.alloc_buffers, *made])

    def _parts(self, value: tirx.PrimExpr) -> tuple[list[tirx.BufferStore], tirx.PrimExpr]:
        """Return the stores of the repeated parts of a value, and the value with their loads."""
        graph = _Graph(self._sizes)
        root = graph.number(value)
        if graph.sizes[root] <= max(_LARGE, 2 * len(graph.nodes)):
            return [], value
        stores = graph.stores(root)
        self.made += [store.buffer for store in stores]
        return stores, graph.rebuilt(root)


def _stored(value: tirx.PrimExpr) -> tirx.BufferStore:
    buffer = tirx.decl_buffer((1,), _dtype_of(value), PART, scope=_LOCAL, layout=None)
    return tirx.BufferStore(buffer, value, [tirx.IntImm("int32", 0)])


class _Graph:
    """The different nodes of an expression, by their numbers.

    Attributes
    ----------
    nodes : list
        An expression for each number; operands have smaller numbers.
    sizes : list[int]
        The nodes of each expression as a tree, with the copies that TVM makes.

    Parameters
    ----------
    variables : Mapping[tirx.Var, int]
        The sizes of the values of variables.
    """

    def __init__(self, variables: Mapping[tirx.Var, int]):
        self._variables = variables
        self.nodes: list[tirx.PrimExpr] = []
        self.sizes: list[int] = []
        self._operands: list[list[int]] = []
        self._lazy: list[int] = []
        self._numbers: dict[Hashable, int] = {}
        self._known: dict[int, int] = {}
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
            own = self._variables.get(expr, 1) if isinstance(expr, tirx.Var) else 1
            self.sizes.append(own + _copies(expr) * sum(self.sizes[i] for i in numbers))
            self._operands.append(numbers)
            is_choice = isinstance(expr, tirx.Select) or _is_conditional(expr)
            self._lazy.append(1 if is_choice else len(numbers))
        self._known[address] = number
        return number

    def stores(self, root: int) -> list[tirx.BufferStore]:
        """Return the stores of the repeated parts of an expression, in order."""
        uses, is_computed = [0] * len(self.nodes), [False] * len(self.nodes)
        is_computed[root] = True
        for number in range(root, -1, -1):
            for place, operand in enumerate(self._operands[number]):
                uses[operand] += _copies(self.nodes[number])
                is_computed[operand] |= is_computed[number] and place < self._lazy[number]
        for number, node in enumerate(self.nodes):
            is_computed[number] |= _has_no_effect(node) and all(
                is_computed[operand] for operand in self._operands[number]
            )
        chosen = [
            number
            for number in range(root)
            if uses[number] > 1
            and is_computed[number]
            and self.sizes[number] > 3
            and _has_numbers(self.nodes[number])
        ]
        stores = []
        for number in chosen:
            store = _stored(self.rebuilt(number))
            stores.append(store)
            self._made[number] = tirx.BufferLoad(store.buffer, store.indices)
        return stores

    def rebuilt(self, number: int) -> tirx.PrimExpr:
        """Return an expression with loads in place of its stored parts."""
        if number not in self._made:
            operands = [self.rebuilt(operand) for operand in self._operands[number]]
            self._made[number] = _with_operands(self.nodes[number], operands)
        return self._made[number]


def _dtype_of(expr: tirx.PrimExpr) -> str:
    return str(expr.dtype) if _is_buffer(expr) else str(expr.ty.dtype)


def _is_buffer(expr: tirx.PrimExpr) -> bool:
    return isinstance(expr, tirx.Var) and is_buffer(expr)


def _has_numbers(expr: tirx.PrimExpr) -> bool:
    return _dtype_of(expr).startswith(("float16", "float32", "float64", "bfloat16"))


def _copies(expr: tirx.PrimExpr) -> int:
    is_function = isinstance(expr, Call) and isinstance(expr.op, Op)
    return _COPIES.get(expr.op.name, 1) if is_function else 1


def _is_conditional(expr: tirx.PrimExpr) -> bool:
    return isinstance(expr, Call) and expr.op.same_as(IF_THEN_ELSE)


def _has_no_effect(expr: tirx.PrimExpr) -> bool:
    """Tell whether an expression only computes: its operands decide whether it is safe."""
    if isinstance(expr, Call):
        effect = expr.op.get_attr("TCallEffectKind") if isinstance(expr.op, Op) else None
        return effect is not None and int(effect) <= _PURE
    if isinstance(expr, _DIVISIONS):
        return _has_numbers(expr)
    return isinstance(expr, (*_BINARY, *_LEAVES, tirx.Not, tirx.Select, tirx.Cast))


def _operands(expr: tirx.PrimExpr) -> list:
    if isinstance(expr, Call):
        return [argument for argument in expr.args if isinstance(argument, tirx.Expr)]
    if isinstance(expr, BufferLoad):
        return [] if _has_predicate(expr) else list(expr.indices)
    return [getattr(expr, name) for name in _OPERANDS.get(type(expr), ())]


def _kind(expr: tirx.PrimExpr) -> tuple:
    """Return what distinguishes an expression from others with the same operands."""
    name = type(expr).__name__
    if isinstance(expr, BufferLoad):
        is_known = not _has_predicate(expr)
    else:
        is_known = isinstance(expr, _DIVISIONS) or _has_no_effect(expr)
    if not is_known:
        return name, expr.__chandle__()
    dtype = _dtype_of(expr)
    if isinstance(expr, tirx.Var):
        return name, expr
    if isinstance(expr, (tirx.IntImm, tirx.FloatImm)):
        return name, dtype, str(expr.value)
    if isinstance(expr, BufferLoad):
        return name, loaded_buffer(expr), dtype
    if isinstance(expr, Call):
        return name, dtype, expr.op
    return name, dtype


def _with_operands(expr: tirx.PrimExpr, operands: list) -> tirx.PrimExpr:
    """Return an expression with other operands."""
    if all(a.same_as(b) for a, b in zip(operands, _operands(expr), strict=True)):
        return expr
    if isinstance(expr, BufferLoad):
        return tirx.BufferLoad(loaded_buffer(expr), operands)
    if isinstance(expr, Call):
        rest = iter(operands)
        args = [next(rest) if isinstance(old, tirx.Expr) else old for old in expr.args]
        return tirx.call_intrin(_dtype_of(expr), expr.op, *args)
    if isinstance(expr, tirx.Cast):
        return tirx.Cast(_dtype_of(expr), *operands)
    return type(expr)(*operands)


def _has_predicate(access: tirx.BufferStore | BufferLoad) -> bool:
    """Tell whether a load or store of a vector leaves elements out."""
    return getattr(access, "predicate", None) is not None
