"""The reverse of statements whose iterations depend on each other: scans, products, and
accumulation in steps.

The loops run backwards, and each store is undone: its cotangent is taken from the gradient of the
element, which is set to 0, and is passed on to the operands. A value that the statement overwrites
is saved for each iteration in which the reverse needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import tvm_ffi
from tvm import tirx
from tvm.ir import Call
from tvm.ir import Range as Interval

from ..errors import GradientError
from ..ir.compat import Analyzer, BufferLoad, IntervalSet, loaded_buffer
from ..ir.dtypes import accumulation_dtype
from ..ir.expressions import are_equal, loads, substitute, variables
from .derivatives import derivative
from .emit import is_parallel
from .flat import ADD, combined
from .program import Part
from .statements import (
    Bind,
    If,
    Loop,
    Statement,
    Store,
    backwards,
    bounds_of_data,
    cast,
    dtype_of,
    guarded,
    is_float,
    mapped,
    negated,
    op_name,
    reads,
    stores,
)


@dataclass
class _Scope:
    """The loops around a statement, and the statements that save values before it."""

    loops: tuple[Loop, ...]
    before: list[Statement] = field(default_factory=list)
    saved: list[tuple[tirx.PrimExpr, tirx.Var]] = field(default_factory=list)


class General:
    """The reverse of one statement.

    Parameters
    ----------
    part : Part
        The statement.
    active : Collection[tirx.Var]
        The buffers on a path of gradients.
    allocate : Callable
        Returns a new buffer, given shape, dtype and name.
    """

    def __init__(
        self,
        part: Part,
        active: Collection[tirx.Var],
        allocate: Callable[[Sequence, str, str], tirx.Var],
    ):
        self._part, self._allocate = part, allocate
        self.own = {store.buffer for store in stores([part.statement])}
        read = reads([part.statement])
        #: The buffers whose gradients the reverse reads or writes, in a fixed order.
        self.buffers = sorted(
            (buffer for buffer in active if buffer in self.own | read),
            key=lambda buffer: buffer.name,
        )
        self.has_tapes = False
        self._gradients: Mapping[tirx.Var, tirx.Var] = {}
        self._scalars: dict[tirx.Var, tirx.Var] = {}

    def reversed(
        self, gradients: Mapping[tirx.Var, tirx.Var]
    ) -> tuple[list[Statement], list[Statement]]:
        """Return the statement with the values saved that its reverse needs, and the reverse.

        Parameters
        ----------
        gradients : Mapping[tirx.Var, tirx.Var]
            The gradient of each of :attr:`buffers`.
        """
        self._gradients = gradients
        return self._block((self._part.statement,), ())

    def _block(
        self, statements: Sequence[Statement], loops: tuple[Loop, ...]
    ) -> tuple[list[Statement], list[Statement]]:
        forward: list[Statement] = []
        start: list[Statement] = []
        back: list[tuple[Statement, _Scope, list[Statement] | None]] = []
        reverse: list[Statement] | None
        for statement in statements:
            scope = _Scope(loops)
            if isinstance(statement, Store):
                reverse = self._store(statement, scope)
            elif isinstance(statement, Bind):
                if is_float(dtype_of(statement.var)):
                    scalar = self._allocate(
                        [1], accumulation_dtype(dtype_of(statement.var)), statement.var.name
                    )
                    self._scalars[statement.var] = scalar
                    start.append(Store(scalar, _ZERO, tirx.const(0.0, str(scalar.dtype))))
                start.append(Bind(statement.var, self._saved(statement.value, scope)))
                reverse = None
            elif isinstance(statement, If):
                body, of_body = self._block(statement.body, loops)
                otherwise, of_otherwise = self._block(statement.otherwise, loops)
                condition = self._saved(statement.condition, scope)
                statement = If(statement.condition, tuple(body), tuple(otherwise))
                reverse = [If(condition, tuple(of_body), tuple(of_otherwise))]
                reverse = reverse if of_body or of_otherwise else []
            else:
                statement, reverse = self._loop(statement, loops)
            back.append((statement, scope, reverse))
        # The reverse of a binding needs the contributions of all its uses.
        undone: list[Statement] = []
        for statement, scope, reverse in reversed(back):
            if isinstance(statement, Bind):
                undone += self._bind(statement, scope)
            elif reverse is not None:
                undone += reverse
        for statement, scope, _ in back:
            forward += [*scope.before, statement]
        return forward, [*start, *undone] if undone else []

    def _loop(self, loop: Loop, loops: tuple[Loop, ...]) -> tuple[Loop, list[Statement]]:
        for expr in (loop.start, loop.extent):
            if self.own & {loaded_buffer(load) for load in loads(expr)}:
                raise GradientError(f"the range of the loop {loop.var.name} changes within it")
        body, reverse = self._block(loop.body, (*loops, loop))
        forward = Loop(loop.var, loop.start, loop.extent, tuple(body))
        if not reverse:
            return forward, []
        back = Loop(loop.var, loop.start, loop.extent, tuple(reverse))
        if is_parallel(back):
            names = {loop.var: tirx.Var(loop.var.name, loop.var.ty.dtype)}
            changed = [mapped(statement, lambda e: substitute(e, names)) for statement in reverse]
            return forward, [Loop(names[loop.var], loop.start, loop.extent, tuple(changed))]
        return forward, [backwards(back)]

    def _store(self, store: Store, scope: _Scope) -> list[Statement]:
        gradient = self._gradients.get(store.buffer)
        if gradient is None:
            return []
        indices = tuple(self._saved(index, scope) for index in store.indices)
        cotangent = tirx.Var("cotangent", str(gradient.dtype))
        own = Bind(cotangent, tirx.BufferLoad(gradient, list(indices)))
        kind, term = combined(store)
        if kind == ADD:  # the element keeps its cotangent
            passed = self._passed_on(term, cotangent, scope)
            return [own, *passed] if passed else []
        zero = tirx.const(0.0, str(gradient.dtype))
        return [
            own,
            Store(gradient, indices, zero),
            *self._passed_on(store.value, cotangent, scope),
        ]

    def _bind(self, bind: Bind, scope: _Scope) -> list[Statement]:
        scalar = self._scalars.get(bind.var)
        if scalar is None:
            return []
        cotangent = tirx.Var("cotangent", str(scalar.dtype))
        passed = self._passed_on(bind.value, cotangent, scope)
        return [Bind(cotangent, tirx.BufferLoad(scalar, list(_ZERO))), *passed] if passed else []

    def _passed_on(
        self, value: tirx.PrimExpr, cotangent: tirx.PrimExpr, scope: _Scope
    ) -> list[Statement]:
        """Return the statements that add the contributions of a value to the gradients of its
        operands."""
        added: list[Statement] = []
        for partial in derivative(value, cotangent, {*self._gradients, *self._scalars}):
            if isinstance(partial.source, BufferLoad):
                target = self._gradients[loaded_buffer(partial.source)]
                indices = tuple(self._saved(index, scope) for index in partial.source.indices)
            else:
                target, indices = self._scalars[partial.source], _ZERO
            term = cast(self._saved(partial.value, scope), str(target.dtype))
            total = tirx.BufferLoad(target, list(indices)) + term
            guards = [self._saved(guard, scope) for guard in partial.guards]
            guards += bounds_of_data(target, indices)
            added.append(guarded(guards, Store(target, indices, total)))
        return added

    def _saved(self, expr: tirx.PrimExpr, scope: _Scope) -> tirx.PrimExpr:
        """Return an expression with saved values of the buffers that the statement writes to."""
        for load, guards in _guarded_loads(expr, ()):
            if loaded_buffer(load) in self.own and not any(
                are_equal(load, known) for known, _ in scope.saved
            ):
                self._save(load, guards, scope)

        def change(load: BufferLoad) -> tirx.PrimExpr:
            for known, tape in scope.saved:
                if are_equal(load, known):
                    return tirx.BufferLoad(tape, list(_place(scope.loops)))
            return load

        return tvm_ffi.structural_map(expr, (BufferLoad, change), order="pre")

    def _save(self, load: BufferLoad, guards: Sequence, scope: _Scope) -> None:
        buffer = loaded_buffer(load)
        shape = [_bound(loop, scope.loops) for loop in scope.loops] or [1]
        tape = self._allocate(shape, dtype_of(buffer), f"{buffer.name}_saved")
        self.has_tapes = True
        # TVM takes the region of accesses under contradictory conditions for a negative one.
        guards = [] if _is_in_bounds(load, scope.loops) else guards
        scope.before.append(guarded(guards, Store(tape, _place(scope.loops), load)))
        scope.saved.append((load, tape))


_ZERO = (tirx.IntImm("int32", 0),)


def _place(loops: Sequence[Loop]) -> tuple:
    """Return the index of a saved value of an iteration."""
    return tuple(loop.var - cast(loop.start, dtype_of(loop.var)) for loop in loops) or _ZERO


def _is_in_bounds(load: BufferLoad, loops: Sequence[Loop]) -> bool:
    """Tell whether a load is in bounds in each iteration of the loops around it."""
    if any(map(loads, load.indices)):
        return False
    analyzer = _within(loops)
    return all(
        analyzer.can_prove(index >= tirx.IntImm(dtype_of(index), 0))
        and analyzer.can_prove(index < cast(extent, dtype_of(index)))
        for index, extent in zip(load.indices, loaded_buffer(load).shape, strict=True)
    )


def _within(loops: Sequence[Loop]) -> Analyzer:
    """Return an analyzer that knows the ranges of loops, the outermost one first."""
    analyzer = Analyzer()
    for loop in loops:
        if not loads(loop.start) and not loads(loop.extent):
            analyzer.bind(loop.var, Interval.from_min_extent(loop.start, loop.extent))
    return analyzer


def _bound(loop: Loop, loops: Sequence[Loop]) -> tirx.PrimExpr:
    """Return the largest extent of a loop."""
    own = {outer.var for outer in loops}
    if not own & variables(loop.extent) and not loads(loop.extent):
        return loop.extent
    bound = _within(loops).const_int_bound(loop.extent).max_value
    if bound < 2**31 - 1:
        return tirx.IntImm(dtype_of(loop.var), int(bound))
    symbolic = _symbolic_bound(loop.extent, loops[: loops.index(loop)])
    if symbolic is None:
        raise GradientError(
            f"the number of iterations of the loop {loop.var.name} has no bound outside of the "
            f"loops around it: {loop.extent}"
        )
    return symbolic


def _symbolic_bound(extent: tirx.PrimExpr, loops: Sequence[Loop]) -> tirx.PrimExpr | None:
    """Return the largest extent of a loop within others as an expression of symbolic extents, or
    None if it depends on data."""
    known = variables(extent).union(*(variables(loop.extent) for loop in loops))
    bound, analyzer = extent, Analyzer()
    for loop in reversed(loops):
        if loop.var in variables(bound):
            last = loop.start + loop.extent - tirx.IntImm(dtype_of(loop.var), 1)
            bound = analyzer.int_set(bound, {loop.var: IntervalSet(loop.start, last)}).max_value
    # An unbounded interval ends at a variable of TVM's.
    if loads(bound) or variables(bound) - known or variables(bound) & {o.var for o in loops}:
        return None
    return tirx.max(analyzer.simplify(bound), tirx.IntImm(dtype_of(bound), 0))


def _guarded_loads(expr: tirx.PrimExpr, guards: tuple) -> Iterator[tuple]:
    """Yield each load of an expression with the conditions under which it is evaluated, outer loads
    first."""
    if isinstance(expr, BufferLoad):
        yield expr, guards
        for index in expr.indices:
            yield from _guarded_loads(index, guards)
    elif isinstance(expr, Call) and op_name(expr) == "if_then_else":
        condition, chosen, other = expr.args
        yield from _guarded_loads(condition, guards)
        yield from _guarded_loads(chosen, (*guards, condition))
        yield from _guarded_loads(other, (*guards, negated(condition)))
    elif isinstance(expr, Call):
        for argument in expr.args:
            if isinstance(argument, tirx.Expr):
                yield from _guarded_loads(argument, guards)
    else:
        for name in ("a", "b", "condition", "true_value", "false_value", "value", "body"):
            child = getattr(expr, name, None)
            if isinstance(child, tirx.Expr):
                yield from _guarded_loads(child, guards)
