"""A call of a function of a library, and the calls of operators in a block that it may replace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tvm import relax
from tvm.ir import Op

from ..ir.aliases import Memory
from ..ir.bindings import used
from .call import BackwardCall

#: The place of a result of a function, or the places of the fields of a tuple.
Place = int | tuple[int, ...]


@dataclass(frozen=True, eq=False)
class LibraryCall:
    """A call of a function of a library.

    Attributes
    ----------
    function : str
        The name of the function.
    operands : list[relax.Expr]
        The tensors.
    numbers : tuple[int | float, ...]
        The numbers after the operands.
    results : list[relax.TensorType]
        The types of the results.
    values : dict[relax.Var, int | tuple[int, ...]]
        For each replaced variable, its result, or its results if it is a tuple. The first one is
        the variable of the main operator.
    variable : relax.Var
        The variable of the call: of one result, the replaced variable.
    """

    function: str
    operands: list[relax.Expr]
    numbers: tuple[int | float, ...]
    results: list[relax.Type]
    values: dict[relax.Var, Place]
    variable: relax.Var = field(init=False)

    def __post_init__(self) -> None:
        variable = next(iter(self.values))
        if not self.is_single:
            kind = relax.TupleType(self.results)
            variable = type(variable)(f"{variable.name}_library", kind)
        object.__setattr__(self, "variable", variable)

    @property
    def is_single(self) -> bool:
        """Whether the call returns a tensor instead of a tuple."""
        return len(self.results) == 1

    def value(self, place: Place) -> relax.Expr:
        """Return a result, or a tuple of results."""
        if isinstance(place, tuple):
            return relax.Tuple([self.value(each) for each in place])
        return self.variable if self.is_single else relax.TupleGetItem(self.variable, place)


class Calls:
    """The bindings of a block, by variable, by operator, and by operand.

    Parameters
    ----------
    bindings : Sequence[relax.Binding]
        The bindings in their order.
    memory : Memory
        The memory of the function.
    visible : Counter
        The number of uses of each variable in the function, including its results.
    """

    def __init__(self, bindings: Sequence[relax.Binding], memory: Memory, visible: Counter):
        self.bindings = bindings
        self._places = {binding.var: place for place, binding in enumerate(bindings)}
        self._values = {binding.var: binding.value for binding in bindings}
        self._memory, self._uses = memory, visible
        #: The calls of the library that are planned already, by replaced variable.
        self.joined: dict[relax.Var, LibraryCall] = {}
        self._users: dict[relax.Var, list[relax.Var]] = {}
        for binding in bindings:
            for variable in dict.fromkeys(used(binding.value)):
                self._users.setdefault(variable, []).append(binding.var)

    def place(self, expr: relax.Expr) -> int:
        """Return the place of a variable's binding; -1 if it is bound before the block."""
        return self._places.get(expr, -1) if isinstance(expr, relax.Var) else -1

    def is_settled(self, *exprs: relax.Expr) -> bool:
        """Tell whether no call of the function writes to these expressions."""
        return all(map(self._memory.is_settled, exprs))

    def uses(self, var: relax.Var) -> int:
        """Return the number of uses of a variable in the function."""
        return self._uses[var]

    def value(self, expr: relax.Expr) -> relax.Expr:
        """Return the value that a variable is bound to in this block, through names and elements of
        literal tuples; an expression without one itself."""
        while True:
            if isinstance(expr, relax.Var) and expr in self._values:
                expr = self._values[expr]
            elif isinstance(expr, relax.TupleGetItem):
                source = self.value(expr.tuple_value)
                if not isinstance(source, relax.Tuple):
                    return expr
                expr = source.fields[expr.index]
            else:
                return expr

    def call_of(self, expr: relax.Expr, *op_names: str) -> relax.Call | None:
        """Return the call of one of these operators that an expression is, or None."""
        value = self.value(expr)
        return value if is_call(value, *op_names) else None

    def users(self, var: relax.Expr, *op_names: str) -> Iterator[tuple[relax.Var, relax.Call]]:
        """Yield the variables bound to calls of these operators that take a variable, and the
        calls."""
        for user in self._users.get(var, ()) if isinstance(var, relax.Var) else ():
            value = self._values[user]
            if is_call(value, *op_names):
                yield user, value

    def similar(
        self,
        op_name: str,
        operands: Sequence[relax.Expr],
        attrs: Mapping[str, object],
        *names: str,
    ) -> relax.Var | None:
        """Return the variable of a call of an operator with these operands and with these
        attributes that have the names, or None."""
        for var, call in self.users(operands[0], op_name):
            own = BackwardCall.of(call).attrs
            if same(call.args, operands) and all(own[name] == attrs[name] for name in names):
                return var
        return None

    def placed(self, call: LibraryCall) -> LibraryCall | None:
        """Return a call without variables that are bound before its operands; None if a call of
        the function writes to a tensor of it."""
        operands = [variable for expr in call.operands for variable in used(expr)]
        if not self.is_settled(*operands, *call.values):
            return None
        ready = max(map(self.place, operands), default=-1)
        for var in [var for var in call.values if self.place(var) <= ready]:
            del call.values[var]
        return call


#: Makes the call of a library for the call of a variable, or returns None.
Join = Callable[[Calls, relax.Var, BackwardCall], "LibraryCall | None"]


def is_call(value: relax.Expr, *op_names: str) -> bool:
    """Tell whether an expression is a call of one of these operators."""
    return isinstance(value, relax.Call) and isinstance(value.op, Op) and value.op.name in op_names


def same(some: Sequence[relax.Expr], others: Sequence[relax.Expr]) -> bool:
    """Tell whether two lists have the same variables."""
    return len(some) == len(others) and all(
        one.same_as(other) for one, other in zip(some, others, strict=True)
    )
