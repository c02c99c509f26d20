"""The product of the other factors of each factor of a product.

It is the derivative of the product, also where factors are 0: the factors before one are multiplied
up in one direction, and those after it in the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tvm import tirx

from ..ir.compat import Analyzer, detect_linear_equation
from ..ir.expressions import loads, substitute, variables
from . import emit
from .access import Range
from .statements import Loop, Statement, Store, backwards, cast, dtype_of, is_number

#: The products that are independent of each other along one loop: two vectors of the widest unit.
_LANES = 32

#: The most parts of a loop that is divided for threads.
_PARTS = 64


#: Returns a new buffer, given shape, dtype and name.
_Allocate: TypeAlias = Callable[[Sequence, str, str], tirx.Var]


@dataclass(frozen=True)
class Factors:
    """The factors of products in all iterations of a nest.

    Attributes
    ----------
    elements : tuple[Range, ...]
        The loops over the products.
    reduced : tuple[Range, ...]
        The loops over the factors of one product.
    value : tirx.PrimExpr
        The factor, in terms of the variables of the loops.
    seed : tirx.PrimExpr
        What the other factors are multiplied by, in terms of the variables of ``elements``.
    """

    elements: tuple[Range, ...]
    reduced: tuple[Range, ...]
    value: tirx.PrimExpr
    seed: tirx.PrimExpr


def others(name: str, factors: Factors, allocate: _Allocate) -> tuple[tirx.Stmt, tirx.PrimExpr]:
    """Return a statement that computes the seed times all factors but one, and the load of it for
    an iteration.

    Parameters
    ----------
    name : str
        The name of the block.
    factors : Factors
        The factors.
    allocate : Callable
        Returns a new buffer, given shape, dtype and name.
    """
    loops = (*factors.elements, *factors.reduced)
    fastest = _fastest(factors.value, loops)
    if any(fastest is loop for loop in factors.reduced):
        statements, load = _along(name, factors, fastest, allocate)
    else:
        statements, load = _across(name, factors, fastest, allocate)
    return emit.general_block(f"{name}_others", statements), load


def _fastest(value: tirx.PrimExpr, loops: Sequence[Range]) -> Range:
    """Return the loop along which most loads read neighbours, the innermost one of several."""
    counts = [0] * len(loops)
    for load in loads(value):
        if not load.indices:
            continue
        *outer, last = load.indices
        for i, loop in enumerate(loops):
            parts = detect_linear_equation(last, [loop.var])
            is_inner = not any(loop.var in variables(index) for index in outer)
            counts[i] += bool(len(parts) and is_number(parts[0], 1) and is_inner)
    best = max(range(len(loops)), key=lambda i: (counts[i], i))
    return loops[best]


def _along(
    name: str, factors: Factors, inner: Range, allocate: _Allocate
) -> tuple[list[Statement], tirx.PrimExpr]:
    """Divide the factors of a product into lanes, neighbours along a loop, which are joined at the
    end."""
    lanes = _Lanes(name, factors, inner, allocate)
    statements = [*lanes.forward(), *lanes.joined(), *lanes.backward()]
    for loop in reversed(factors.elements):
        statements = [_loop(loop, statements)]
    return statements, emit.load(lanes.rest, lanes.at(inner.var - inner.start))


class _Lanes:
    """The products of the factors in each lane, which are independent of each other.

    Parameters
    ----------
    name, factors, allocate
        The arguments of :func:`others`.
    inner : Range
        The loop whose neighbours are in different lanes.

    Attributes
    ----------
    rest : tirx.Var
        The products of the other factors, of each factor.
    """

    def __init__(self, name: str, factors: Factors, inner: Range, allocate: _Allocate):
        self._factors, self._inner = factors, inner
        dtype, kind = str(inner.var.ty.dtype), dtype_of(factors.seed)
        zero, one = tirx.IntImm(dtype, 0), tirx.IntImm(dtype, 1)
        width = min(_LANES, inner.size or _LANES)
        self._lanes = Range(tirx.Var("lane", dtype), zero, tirx.IntImm(dtype, width))
        self._places = [loop.var - loop.start for loop in factors.elements]
        extents = [loop.extent for loop in factors.elements]
        reduced = [loop.extent for loop in factors.reduced]
        self.rest = allocate([*extents, *reduced], kind, f"{name}_others")
        #: The products of the factors of a lane before one, and after it.
        self._products = allocate([*extents, self._lanes.extent], kind, f"{name}_lanes")
        self._after = allocate([*extents, self._lanes.extent], kind, f"{name}_after")
        self._running = allocate([*extents, one], kind, f"{name}_running")
        self._lane, self._total = (*self._places, self._lanes.var), (*self._places, zero)
        size = cast(inner.extent, dtype)
        chunks = tirx.floordiv(size, self._lanes.extent)
        left = Analyzer().simplify(size - chunks * self._lanes.extent)
        self._chunks = Range(tirx.Var("chunk", dtype), zero, chunks)
        self._tail = Range(self._lanes.var, zero, left)

    def at(self, place: tirx.PrimExpr) -> tuple[tirx.PrimExpr, ...]:
        """Return the index of ``rest`` of the place of a factor along the inner loop."""
        reduced = self._factors.reduced
        return (
            *self._places,
            *(place if loop is self._inner else loop.var - loop.start for loop in reduced),
        )

    def forward(self) -> list[Statement]:
        """Multiply the factors before each factor."""
        one = tirx.const(1.0, dtype_of(self._factors.seed))
        chunk = self._chunks.var * self._lanes.extent + self._lanes.var
        loops: list[Statement] = [_loop(self._chunks, [_loop(self._lanes, self._down(chunk))])]
        if self._has_tail:
            loops.append(_loop(self._tail, self._down(self._end)))
        for loop in reversed(self._outer):
            loops = [_loop(loop, loops)]
        return [_loop(self._lanes, [Store(self._products, self._lane, one)]), *loops]

    def joined(self) -> list[Statement]:
        """Multiply the seed and the products of the lanes before and after each lane."""
        running, total, lane = self._running, self._total, self._lane
        multiplied = emit.load(running, total) * emit.load(self._products, lane)
        before = [
            Store(self._after, lane, emit.load(running, total)),
            Store(running, total, multiplied),
        ]
        after = [
            Store(self._after, lane, emit.load(self._after, lane) * emit.load(running, total)),
            Store(running, total, multiplied),
        ]
        return [
            Store(running, total, self._factors.seed),
            _loop(self._lanes, before),
            Store(running, total, tirx.const(1.0, dtype_of(self._factors.seed))),
            backwards(_loop(self._lanes, after)),
        ]

    def backward(self) -> list[Statement]:
        """Multiply the factors after each factor, from the last one on."""
        last = self._chunks.extent - 1 - self._chunks.var
        chunk = last * self._lanes.extent + self._lanes.var
        loops: list[Statement] = [_loop(self._chunks, [_loop(self._lanes, self._up(chunk))])]
        if self._has_tail:
            loops.insert(0, _loop(self._tail, self._up(self._end)))
        for loop in reversed(self._outer):
            loops = [backwards(_loop(loop, loops))]
        return loops

    @property
    def _outer(self) -> list[Range]:
        return [loop for loop in self._factors.reduced if loop is not self._inner]

    @property
    def _has_tail(self) -> bool:
        return not is_number(self._tail.extent, 0)

    @property
    def _end(self) -> tirx.PrimExpr:
        """The place of a factor of the tail."""
        return self._chunks.extent * self._lanes.extent + self._lanes.var

    def _value(self, place: tirx.PrimExpr) -> tirx.PrimExpr:
        return substitute(self._factors.value, {self._inner.var: self._inner.start + place})

    def _down(self, place: tirx.PrimExpr) -> tuple[Statement, ...]:
        product = emit.load(self._products, self._lane)
        return (
            Store(self.rest, self.at(place), product),
            Store(self._products, self._lane, product * self._value(place)),
        )

    def _up(self, place: tirx.PrimExpr) -> tuple[Statement, ...]:
        at, after = self.at(place), emit.load(self._after, self._lane)
        return (
            Store(self.rest, at, emit.load(self.rest, at) * after),
            Store(self._after, self._lane, after * self._value(place)),
        )


def _across(
    name: str, factors: Factors, inner: Range, allocate: _Allocate
) -> tuple[list[Statement], tirx.PrimExpr]:
    """Compute neighbouring products side by side."""
    kind = dtype_of(factors.seed)
    outer = [loop for loop in factors.elements if loop is not inner]
    # The parts of the inner loop run in parallel.
    part, lane, values = _divided(inner)
    axes = [*outer, *factors.reduced, inner]
    rest = allocate([axis.extent for axis in axes], kind, f"{name}_others")
    product = allocate([*(loop.extent for loop in outer), inner.extent], kind, f"{name}_product")

    def placed(expr: tirx.PrimExpr) -> tirx.PrimExpr:
        return substitute(expr, values)

    at = tuple(placed(axis.var - axis.start) for axis in axes)
    own = tuple(placed(axis.var - axis.start) for axis in (*outer, inner))
    value = placed(factors.value)
    one = tirx.const(1.0, kind)
    forward = [
        _loop(
            lane,
            [
                Store(rest, at, emit.load(product, own)),
                Store(product, own, emit.load(product, own) * value),
            ],
        )
    ]
    backward = [
        _loop(
            lane,
            [
                Store(rest, at, emit.load(rest, at) * emit.load(product, own)),
                Store(product, own, emit.load(product, own) * value),
            ],
        )
    ]
    for loop in reversed(factors.reduced):
        forward, backward = [_loop(loop, forward)], [backwards(_loop(loop, backward))]
    statements: list[Statement] = [
        _loop(lane, [Store(product, own, one)]),
        *forward,
        _loop(lane, [Store(product, own, placed(factors.seed))]),
        *backward,
    ]
    for loop in reversed([*outer, *part]):
        statements = [_loop(loop, statements)]
    return statements, emit.load(rest, [axis.var - axis.start for axis in axes])


def _divided(loop: Range) -> tuple[list[Range], Range, dict]:
    """Return an outer loop over parts, the loop within a part, and the value of the variable."""
    size, dtype = loop.size or 0, str(loop.var.ty.dtype)
    parts = (
        max((i for i in range(1, _PARTS + 1) if size % (i * _LANES) == 0), default=1) if size else 1
    )
    if parts == 1:
        return [], loop, {}
    width = size // parts
    zero = tirx.IntImm(dtype, 0)
    part, lane = (tirx.Var(f"{loop.var.name}_{i}", dtype) for i in range(2))
    value = loop.start + part * tirx.IntImm(dtype, width) + lane
    return (
        [Range(part, zero, tirx.IntImm(dtype, parts))],
        Range(lane, zero, tirx.IntImm(dtype, width)),
        {loop.var: value},
    )


def _loop(loop: Range, body: Sequence[Statement]) -> Loop:
    return Loop(loop.var, loop.start, loop.extent, tuple(body))
