"""Tiles of matrix products, held in registers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import tvm.tirx.script.builder as T
from tvm import tirx

from ..language import builder as b
from ..language.builder import Accumulators, Extent, Vectors, as_expr, bind, ceil_div
from ..language.extents import LINE
from ..language.halves import Tensor

#: The prefetches up to which they are emitted one after the other, without a loop.
_MOST_IN_A_ROW = 32

#: A call without an instruction. LLVM does not unroll a loop with inline assembly.
_ROLLED = """
define linkonce_odr hidden i32 @relax_grad_rolled() alwaysinline nounwind {
  call void asm sideeffect "", ""()
  ret i32 0
}
"""


@dataclass(frozen=True)
class Ahead:
    """Prefetches of rows of cache lines.

    Attributes
    ----------
    rows : int or tirx.PrimExpr
        The number of rows.
    emit : Callable
        ``emit(i, j)`` emits the prefetch of line j of row i.
    lines : int
        The number of lines of a row.
    """

    rows: Extent
    emit: Callable
    lines: int = 1

    @property
    def number(self) -> Extent:
        """The number of lines."""
        return self.rows * self.lines

    def each(self, number: Extent) -> None:
        """Emit the prefetch of a line of a number."""
        i, j = (number, 0) if self.lines == 1 else (number // self.lines, number % self.lines)
        self.emit(i, j)

    def all(self) -> None:
        """Emit all prefetches, one after the other.

        The code is within a tile, so it has neither divisions nor jumps if the number is known.
        """
        if isinstance(self.number, int) and self.number <= _MOST_IN_A_ROW:
            for i in range(self.rows):
                for j in range(self.lines):
                    self.emit(i, j)
            return
        with b.serial(0, self.rows) as i:
            for j in range(self.lines):
                self.emit(i, j)


def equal_height(rows: Extent, most: int) -> int:
    """Return the height of the fewest strips of at most ``most`` rows, all as high as possible.

    A low strip takes as long as its multiply-adds wait for each other. Strips of a symbolic number
    of rows have ``most`` rows.
    """
    return ceil_div(rows, ceil_div(rows, most)) if isinstance(rows, int) else most


def rows_up_to(first: Extent, number: int, end: Extent) -> list:
    """Return the offsets of ``number`` rows from the first one, clamped to the last row before
    ``end``.

    A tile computes a repeated row twice, and stores the same values.
    """
    return [bind(tirx.min(b.const(i), end - 1 - first)) for i in range(number)]


def rolled_loops() -> AbstractContextManager[object]:
    """Return the frame of statements with tiles that are ``rolled``."""
    return T.attr(0, "pragma_import_llvm", _ROLLED)


def lines_of(buffer: Tensor, start: tirx.PrimExpr, pitch: Extent, rows: int, width: int) -> Ahead:
    """Return the prefetches of rows of a matrix into the second-level cache.

    Parameters
    ----------
    buffer : tirx.Buffer or Half
        The matrix.
    start : tirx.PrimExpr
        The index of the first element.
    pitch : int or tirx.PrimExpr
        The distance of rows.
    rows, width : int
        The number of rows, and of elements of each.
    """

    def emit(i: Extent, j: Extent) -> None:
        b.prefetch(buffer, start + i * pitch + j * LINE)

    # Rows that do not begin with a line end in another one.
    is_aligned = isinstance(pitch, int) and pitch % LINE == 0
    return Ahead(rows, emit, ceil_div(width, LINE) + (not is_aligned))


def multiply_add(
    vectors: Vectors,
    size: tuple[int, int],
    depth: Extent | None,
    value: Callable,
    vector: Callable,
    place: Callable,
    *,
    add: tirx.PrimExpr | bool,
    prefetch: bool = False,
    rolled: bool = False,
    unrolled: int = 1,
    has_rest: bool = False,
    multiply: Callable = lambda total, a, b: total + a * b,
    bias: Callable | None = None,
    finish: Callable = lambda total, i: total,
    each: Callable | None = None,
    ahead: Sequence[Ahead] = (),
    rounds: int = 1,
) -> None:
    """Emit a tile: the sum over k of ``value(i, k) * vector(k, v)`` for each row i and each vector
    v of a row.

    Parameters
    ----------
    vectors : Vectors
        The vectors.
    size : tuple[int, int]
        The number of rows, and of vectors in a row.
    depth : int or tirx.PrimExpr or None
        The extent of k; None with ``each``.
    value, vector : Callable
        Return a scalar and a vector.
    place : Callable
        ``place(i, v)`` returns the location of a vector of the tile: buffer, index, and the number
        of lanes that exist (None: all of them).
    add : bool or tirx.PrimExpr
        Whether to add to the values in the buffer, instead of overwriting them.
    prefetch : bool
        Whether these values may be in distant caches. They are prefetched, and added after the
        sum, which does not wait for them.
    rolled : bool
        Whether the loop over k is not unrolled, within :func:`rolled_loops`. Where LLVM unrolls
        it, it loads the next operands early, and spills accumulators of a tile that takes all
        registers.
    unrolled : int
        The steps in a round of the loop over k.
    has_rest : bool
        Whether steps may be left after the rounds: their number does not divide the extent.
    multiply : Callable
        ``multiply(total, a, b)`` adds a product of vectors.
    bias : Callable, optional
        ``bias(v)`` returns the vector that is added to the v-th vector of each row, if the values
        in the buffer are overwritten.
    finish : Callable
        ``finish(total, i)`` returns the vector to store, given a sum of row i.
    each : Callable, optional
        ``each(step)`` emits the loops of the sum and calls ``step(k)`` in the innermost one, where
        k may be anything.
    ahead : Sequence[Ahead]
        One or two kinds of prefetches, which are spread over the rounds. Those of the values in the
        buffer are among them, if they are to be prefetched.
    rounds : int
        The expected number of rounds, with ``ahead``.
    """
    rows, columns = size
    cells = [(i, v) for i in range(rows) for v in range(columns)]
    total = Accumulators(vectors, len(cells))

    def load() -> None:
        for index, cell in enumerate(cells):
            total[index] = vectors.load(*place(*cell))

    def clear() -> None:
        for index in range(len(cells)):
            total[index] = vectors.splat(0)

    def add_old() -> None:
        # All are read before the first one is stored: rows may repeat.
        for index, cell in enumerate(cells):
            total[index] = total[index] + vectors.load(*place(*cell))

    def add_bias() -> None:
        if bias is None:
            return
        for v in range(columns):
            term = bind(bias(v))
            for index in range(v, len(cells), columns):
                total[index] = total[index] + term

    if prefetch and add is not False:
        for cell in cells if not ahead else ():
            buffer, at, _ = place(*cell)
            b.prefetch(buffer, at, level=1)
        clear()
    else:
        _choose(add, load, clear)

    def step(k: tirx.PrimExpr | tuple[tirx.PrimExpr, tirx.PrimExpr]) -> None:
        if rolled:
            T.evaluate(tirx.call_extern("int32", "relax_grad_rolled"))
        factors = [bind(vector(k, v)) for v in range(columns)]
        for i in range(rows):
            splat = bind(vectors.splat(value(i, k)))
            for v in range(columns):
                index = i * columns + v
                total[index] = multiply(total[index], splat, factors[v])

    if each is not None:
        each(step)
    else:

        def one(number: tirx.PrimExpr) -> None:
            for i in range(unrolled):
                step(number * unrolled + i)

        number = b.quotient(depth, unrolled)
        number = b.computed(number) if has_rest else number
        spread(ahead, number, rounds, one)
        if has_rest:
            with b.serial(number * unrolled, depth) as k:
                step(k)
    if prefetch or bias is not None:
        _choose(add, add_old if prefetch else _nothing, add_bias)
    for index, cell in enumerate(cells):
        buffer, at, number = place(*cell)
        vectors.store(buffer, at, finish(total[index], cell[0]), number)


def spread(ahead: Sequence[Ahead], number: Extent, expected: int, one: Callable) -> None:
    """Emit some rounds with prefetches.

    A core has few buffers for cache lines that are on their way. Prefetches one after the other
    take all of them, and the first steps wait for theirs.

    Parameters
    ----------
    ahead : Sequence[Ahead]
        The prefetches: the first rounds have the first kind, and the other rounds the second kind,
        whose last prefetch they repeat.
    number : int or tirx.PrimExpr
        The number of rounds.
    expected : int
        The number that it most likely is, if it is symbolic.
    one : Callable
        Emits a round of a number.
    """
    if not ahead:
        with b.serial(0, number) as i:
            one(i)
        return
    own, *others = ahead
    expected = number if isinstance(number, int) else expected
    each = ceil_div(own.number, max(1, expected - len(others)))
    first = ceil_div(own.number, each)
    stop = min(first, number) if isinstance(number, int) else bind(tirx.min(b.const(first), number))
    with b.serial(0, stop) as i:
        for line in range(each):
            own.each(i * each + line)
        one(i)
    if not isinstance(number, int):
        with b.serial(stop * each, own.number) as line:
            own.each(line)
    with b.serial(stop, number) as i:
        for other in others:
            _share(other, i - stop, max(1, expected - first))
        one(i)


def _share(ahead: Ahead, at: tirx.PrimExpr, parts: int) -> None:
    """Emit a part of some prefetches; those beyond repeat the last one."""
    number = ahead.number
    if isinstance(number, int) and number == 0:
        return
    each = ceil_div(number, parts) if isinstance(number, int) else 1
    for i in range(each):
        ahead.each(bind(tirx.min(at * each + i, as_expr(number) - 1)))


def _nothing() -> None:
    """Emit nothing."""


def _choose(condition: bool | tirx.PrimExpr, then: Callable, otherwise: Callable) -> None:
    """Emit an if, or one branch if the condition is known."""
    if isinstance(condition, bool):
        (then if condition else otherwise)()
    else:
        b.either(condition, then, otherwise)
