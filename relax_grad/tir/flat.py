"""Nests whose iterations can run in any order: maps, gathers, sums, products, maxima and minima."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard, TypeVar

import tvm_ffi
from tvm import tirx

from ..ir.compat import BufferLoad, loaded_buffer
from ..ir.expressions import are_equal, loads, substitute, variables
from .access import Range, gather, ranges_of
from .statements import Bind, If, Loop, Statement, Store, is_true, negated

T = TypeVar("T")

#: The most nodes of an expression in which bindings are replaced by their values.
_LARGEST = 1000

#: The kinds of stores: ``b = e``, ``b = b + e``, ``b = b * e``, ``b = max(b, e)`` and
#: ``b = min(b, e)``.
ASSIGN, ADD, PRODUCT, MAXIMUM, MINIMUM = "assign", "add", "product", "maximum", "minimum"

EXTREMA = (MAXIMUM, MINIMUM)

_COMBINED = (
    *((tirx.Add, ADD), (tirx.Sub, ADD), (tirx.Mul, PRODUCT)),
    *((tirx.Max, MAXIMUM), (tirx.Min, MINIMUM)),
)


@dataclass(frozen=True)
class Item:
    """A store in all iterations of a nest.

    Attributes
    ----------
    kind : str
        Its kind.
    guards : tuple[tirx.PrimExpr, ...]
        The conditions under which it happens.
    buffer : tirx.Var
        The buffer.
    indices : tuple[tirx.PrimExpr, ...]
        The indices of the element.
    value : tirx.PrimExpr
        The value ``e``.
    init : tirx.PrimExpr, optional
        The initial value of an extremum or a product.
    """

    kind: str
    guards: tuple[tirx.PrimExpr, ...]
    buffer: tirx.Var
    indices: tuple[tirx.PrimExpr, ...]
    value: tirx.PrimExpr
    init: tirx.PrimExpr | None = None


@dataclass(frozen=True)
class Nest:
    """A nest of loops with stores, none of which reads an element that the nest writes to, except
    its own."""

    loops: tuple[Range, ...]
    items: tuple[Item, ...]


def nests(statement: Statement) -> list[Nest] | None:
    """Return a statement as nests in order, or None if its iterations depend on each other.

    The initialisation of a reduction becomes a separate nest, over the loops of the element.
    """
    loops: list[Loop] = []
    body: tuple[Statement, ...] = (statement,)
    while len(body) == 1 and (isinstance(body[0], Loop) or _is_sequence(body[0])):
        loops += [inner for inner in body if isinstance(inner, Loop)]
        body = body[0].body
    ranges = ranges_of(loops)
    if ranges is None:
        return None
    try:
        guarded = list(_guarded_stores(body, (), {}))
    except _NotFlatError:
        return None
    written = {store.buffer for _, _, store in guarded}
    items = [_item(guards, store) for is_init, guards, store in guarded if not is_init]
    inits = [Item(ASSIGN, guards[1:], store.buffer, store.indices, store.value)
             for is_init, guards, store in guarded if is_init]  # fmt: skip
    for item in (*items, *inits):
        read = {loaded_buffer(load) for expr in (*item.guards, *item.indices, item.value)
                for load in loads(expr)}  # fmt: skip
        if read & written:
            return None
    first = _complete(_initial(init, items, ranges) for init in inits)
    if first is None or not _are_independent(items, ranges):
        return None
    started = _complete(_with_init(item, inits) for item in items)
    if started is None:
        return None
    return [*first, Nest(tuple(ranges), tuple(started))]


def _complete(values: Iterable[T | None]) -> list[T] | None:
    """Return values as a list, or None if one is missing."""
    present = []
    for value in values:
        if value is None:
            return None
        present.append(value)
    return present


def _is_sequence(statement: Statement) -> TypeGuard[If]:
    """Tell whether a statement is a conditional that always holds."""
    return isinstance(statement, If) and is_true(statement.condition) and not statement.otherwise


class _NotFlatError(Exception):
    """The body of a nest has another loop, or an expression that is too large without bindings."""


def _guarded_stores(
    body: Sequence[Statement], guards: tuple, values: Mapping
) -> Iterator[tuple[bool, tuple, Store]]:
    """Yield whether a store initialises a reduction, its conditions, and the store without bound
    variables."""
    values = dict(values)
    for statement in body:
        if isinstance(statement, Loop):
            raise _NotFlatError
        if isinstance(statement, Bind):
            values[statement.var] = _small(substitute(statement.value, values))
        elif isinstance(statement, If):
            condition = substitute(statement.condition, values)
            for is_init, inner, store in _guarded_stores(
                statement.body, (*guards, condition), values
            ):
                # The condition of an initialisation comes first, so that it can be left out.
                order = (
                    (condition, *(g for g in inner if g is not condition))
                    if statement.is_init
                    else inner
                )
                yield is_init or statement.is_init, order, store
            yield from _guarded_stores(statement.otherwise, (*guards, negated(condition)), values)
        else:
            indices = tuple(substitute(index, values) for index in statement.indices)
            yield (
                False,
                guards,
                Store(statement.buffer, indices, _small(substitute(statement.value, values))),
            )


def _small(expr: tirx.PrimExpr) -> tirx.PrimExpr:
    count = 0

    def visit(_node: tirx.Expr) -> None:
        nonlocal count
        count += 1

    tvm_ffi.structural_walk(expr, (tirx.Expr, visit))
    if count > _LARGEST:
        raise _NotFlatError
    return expr


def combined(store: Store) -> tuple[str, tirx.PrimExpr]:
    """Return the kind of a store, and the value that it assigns or combines with the element."""
    value = store.value
    for operation, kind in _COMBINED:
        if isinstance(value, operation):
            if _is_element(value.a, store):
                return kind, -value.b if isinstance(value, tirx.Sub) else value.b
            if _is_element(value.b, store) and not isinstance(value, tirx.Sub):
                return kind, value.a
    return ASSIGN, value


def _item(guards: tuple, store: Store) -> Item:
    """Return a store as an item of its kind."""
    kind, value = combined(store)
    return Item(kind, guards, store.buffer, store.indices, value)


def _is_element(expr: tirx.PrimExpr, store: Store) -> bool:
    return (
        isinstance(expr, BufferLoad)
        and loaded_buffer(expr).same_as(store.buffer)
        and same(expr.indices, store.indices)
    )


def same(first: Sequence, other: Sequence) -> bool:
    """Tell whether two lists of expressions are structurally equal, with the same buffers."""
    return len(first) == len(other) and all(map(are_equal, first, other))


def _initial(init: Item, items: Sequence[Item], ranges: Sequence[Range]) -> Nest | None:
    """Return the nest of an initialisation, or None if it may touch other elements than the
    reduction."""
    own = [item for item in items if item.buffer.same_as(init.buffer)]
    if not own or not all(same(item.indices, init.indices) for item in own):
        return None
    used = {var for expr in (*init.indices, init.value, *init.guards) for var in variables(expr)}
    loops = tuple(loop for loop in ranges if loop.var in used)
    return Nest(loops, (init,)) if _is_injective(init, loops) else None


def _with_init(item: Item, inits: Sequence[Item]) -> Item | None:
    """Return an extremum or a product with the constant that it starts from; None if it starts from
    data."""
    if item.kind not in (*EXTREMA, PRODUCT):
        return item
    own = [init for init in inits if init.buffer.same_as(item.buffer)]
    if len(own) != 1 or own[0].guards or loads(own[0].value) or variables(own[0].value):
        return None
    return replace(item, init=own[0].value)


def _are_independent(items: Sequence[Item], ranges: Sequence[Range]) -> bool:
    """Tell whether the stores of different iterations, and of one, can happen in any order."""
    for i, item in enumerate(items):
        others = [earlier for earlier in items[:i] if earlier.buffer.same_as(item.buffer)]
        if item.kind == ADD and all(earlier.kind == ADD for earlier in others):
            continue
        if item.kind in EXTREMA and not others:
            continue
        if item.kind == PRODUCT and not others:
            if _is_injective(item, elements_of(item, ranges)):
                continue
            return False
        if item.kind != ASSIGN or not _is_injective(item, ranges):
            return False
        if not all(_are_exclusive(item, earlier) for earlier in others):
            return False
    return True


def elements_of(item: Item, ranges: Sequence[Range]) -> list[Range]:
    """Return the loops over the elements that a reduction stores to."""
    used = {var for index in item.indices for var in variables(index)}
    return [loop for loop in ranges if loop.var in used]


def _is_injective(item: Item, ranges: Sequence[Range]) -> bool:
    """Tell whether different iterations store to different elements."""
    gathered = gather(item.indices, item.buffer.shape, ranges)
    return gathered is not None and not gathered.reduced


def _are_exclusive(first: Item, other: Item) -> bool:
    """Tell whether two stores to the same element are in different branches of a conditional."""
    return same(first.indices, other.indices) and any(
        tvm_ffi.structural_equal(a, negated(b))
        for x, y in ((first, other), (other, first))
        for a in x.guards
        for b in y.guards
    )
