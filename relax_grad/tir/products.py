"""The product of the other factors of each factor of a product.

It is the derivative of the product, also where factors are 0: the factors before one are multiplied
up in one direction, and those after it in the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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


def others(
    name: str, factors: Factors, allocate: Callable[[Sequence, str, str], tirx.Var]
) -> tuple[tirx.Stmt, tirx.PrimExpr]:
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
    name: str, factors: Factors, inner: Range, allocate: Callable[[Sequence, str, str], tirx.Var]
) -> tuple[list[Statement], tirx.PrimExpr]:
    """Divide the factors of a product into lanes, neighbours along a loop, which are joined at the
    end."""
    dtype, outer = str(inner.var.ty.dtype), [loop for loop in factors.reduced if loop is not inner]
    width = min(_LANES, inner.size or _LANES)
    kind = dtype_of(factors.seed)
    one, zero = tirx.const(1.0, kind), tirx.IntImm(dtype, 0)
    lanes = Range(tirx.Var("lane", dtype), zero, tirx.IntImm(dtype, width))
    places = [loop.var - loop.start for loop in factors.elements]
    extents = [loop.extent for loop in factors.elements]
    rest = allocate([*extents, *(e.extent for e in factors.reduced)], kind, f"{name}_others")
    lane_products, after = (
        allocate([*extents, lanes.extent], kind, f"{name}_{kind_of}")
        for kind_of in ("lanes", "after")
    )
    running = allocate([*extents, tirx.IntImm(dtype, 1)], kind, f"{name}_running")

    def at(place: tirx.PrimExpr) -> tuple[tirx.PrimExpr, ...]:
        """Return the index of ``rest`` of the place of a factor along the inner loop."""
        return (*places, *(place if e is inner else e.var - e.start for e in factors.reduced))

    def value(place: tirx.PrimExpr) -> tirx.PrimExpr:
        return substitute(factors.value, {inner.var: inner.start + place})

    lane = (*places, lanes.var)
    total = (*places, tirx.IntImm(dtype, 0))
    size = cast(inner.extent, dtype)
    chunks = tirx.floordiv(size, lanes.extent)
    tail = Range(lanes.var, zero, Analyzer().simplify(size - chunks * lanes.extent))
    chunk = Range(tirx.Var("chunk", dtype), zero, chunks)

    def down(place: tirx.PrimExpr) -> tuple[Statement, ...]:
        return (
            Store(rest, at(place), emit.load(lane_products, lane)),
            Store(lane_products, lane, emit.load(lane_products, lane) * value(place)),
        )

    def up(place: tirx.PrimExpr) -> tuple[Statement, ...]:
        return (
            Store(rest, at(place), emit.load(rest, at(place)) * emit.load(after, lane)),
            Store(after, lane, emit.load(after, lane) * value(place)),
        )

    first = chunk.var * lanes.extent + lanes.var
    last = (chunks - 1 - chunk.var) * lanes.extent + lanes.var
    end = chunks * lanes.extent + lanes.var
    has_tail = not is_number(tail.extent, 0)
    forward: list[Statement] = [_loop(chunk, [_loop(lanes, down(first))])]
    backward: list[Statement] = [_loop(chunk, [_loop(lanes, up(last))])]
    if has_tail:
        forward = [*forward, _loop(tail, down(end))]
        backward = [_loop(tail, up(end)), *backward]
    for loop in reversed(outer):
        forward = [_loop(loop, forward)]
        backward = [backwards(_loop(loop, backward))]
    own = [
        _loop(lanes, [Store(lane_products, lane, one)]),
        *forward,
        Store(running, total, factors.seed),
        _loop(
            lanes,
            [
                Store(after, lane, emit.load(running, total)),
                Store(running, total, emit.load(running, total) * emit.load(lane_products, lane)),
            ],
        ),
        Store(running, total, one),
        backwards(
            _loop(
                lanes,
                [
                    Store(after, lane, emit.load(after, lane) * emit.load(running, total)),
                    Store(
                        running, total, emit.load(running, total) * emit.load(lane_products, lane)
                    ),
                ],
            )
        ),
        *backward,
    ]
    for loop in reversed(factors.elements):
        own = [_loop(loop, own)]
    return own, emit.load(rest, at(inner.var - inner.start))


def _across(
    name: str, factors: Factors, inner: Range, allocate: Callable[[Sequence, str, str], tirx.Var]
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
