"""Pooling of planes and volumes and its gradients, with or without indices saved by the forward
pass.

A plane is copied with its padding, such that columns that are a stride apart become contiguous: a
tap of consecutive windows then reads a vector. For the gradient of maximum pooling, the winning tap
of each window is found once and stored with the window's gradient. Then every element sums the
gradients of the windows in which it wins. Each element is written once, and the result does not
depend on the order of threads. All of this is done for a band of rows of windows after the other,
so that the copies stay in the first-level cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from tvm import tirx

from ...target import CPU
from ..language import builder as b
from ..language.builder import Accumulators, Extent, Vectors, bind, const, sum_of
from ..language.halves import Tensor
from .pool_geometry import Pool, Windows
from .pool_plan import pool_plan
from .pool_windows import (
    Band,
    Shares,
    Source,
    each_band,
    each_plane,
    each_row_of_windows,
    is_streamed,
)

_LOWEST = float("-inf")

Shapes = Sequence[Sequence[Extent]]


def max_pool(pool: Pool, shapes: Shapes, cpu: CPU, winners: bool = False) -> tirx.PrimFunc:
    """Return the kernel of maximum pooling.

    Parameters
    ----------
    pool : Pool
        The geometry of the pooling.
    shapes : Sequence
        The shapes of x and y.
    cpu : CPU
        The target CPU.
    winners : bool
        Whether there is an additional result, of the shape of y: the winning tap of each window, as
        int8.

    Returns
    -------
    function : tirx.PrimFunc
        Takes x and y, and the winners if wanted. A NaN is larger than any number.
    """
    plan, vectors = pool_plan(pool, cpu), Vectors(cpu.lanes)
    bytes_ = Vectors(cpu.lanes, "int8")

    def body(x: Tensor, y: Tensor, *won: tirx.Buffer) -> None:
        with each_plane(plan) as planes:
            source = Source(plan, vectors, _LOWEST)

            def windows(plane: tirx.PrimExpr, band: Band, finite: bool) -> None:
                with each_row_of_windows(pool, band) as at:
                    base = pool.windows(plane, at)

                    def some(j: tirx.PrimExpr, number: Extent | None) -> None:
                        taps = list(source.taps(at, j))
                        vectors.store(y, base + j, _largest(vectors, taps, finite), number)
                        if won:
                            winner = _winner(pool, vectors, taps, at=at, j=j, finite=finite)
                            winner = tirx.Cast(f"int8x{vectors.lanes}", winner)
                            bytes_.store(won[0], base + j, winner, number)

                    vectors.each(pool.columns.number, some)

            with planes() as plane, each_band(plan) as band:
                source.fill(x, plane, band)
                _if_finite(source, lambda finite: windows(plane, band, finite))

    params = b.floats(("x", "y"), shapes)
    if winners:
        params.append(("winners", shapes[1], "int8"))
    return b.prim_func("max_pool", params, body)


def max_pool_backward(pool: Pool, shapes: Shapes, cpu: CPU, winners: bool = False) -> tirx.PrimFunc:
    """Return the kernel of the gradient of maximum pooling.

    Parameters
    ----------
    pool, cpu
        As for :func:`max_pool`.
    shapes : Sequence
        The shapes of dy, x and dx.
    winners : bool
        Whether it takes the winners of :func:`max_pool` instead of x.

    Returns
    -------
    function : tirx.PrimFunc
        Takes dy, x or the winners, and dx. Among equal elements of a window the first wins, and
        among several NaNs the last.
    """
    plan, vectors = pool_plan(pool, cpu), Vectors(cpu.lanes)
    bytes_ = Vectors(cpu.lanes, "int8")

    def body(dy: Tensor, x: Tensor, dx: Tensor) -> None:
        streamed = is_streamed(plan, (dy, x, dx))
        with each_plane(plan, streamed) as planes:
            grads = Shares(plan, vectors, streamed)
            integers = grads.integers
            source = None if winners else Source(plan, vectors, _LOWEST)
            won, values = grads.buffer(integers, -1), grads.buffer(vectors, 0)

            def share(at: tirx.PrimExpr, tap: int) -> tirx.PrimExpr:
                is_won = tirx.EQ(integers.load(won, at), integers.splat(tap))
                return tirx.Select(is_won, vectors.load(values, at), vectors.splat(0))

            def windows(plane: tirx.PrimExpr, band: Band, finite: bool) -> None:
                with each_row_of_windows(pool, band) as at:
                    base = pool.windows(plane, at)

                    def some(j: tirx.PrimExpr, number: Extent | None) -> None:
                        if source is None:
                            winner = bytes_.load(x, base + j, number)
                            winner = tirx.Cast(f"int32x{vectors.lanes}", winner)
                        else:
                            taps = list(source.taps(at, j))
                            winner = _winner(pool, vectors, taps, at=at, j=j, finite=finite)
                        place = bind(grads.at(at, j))
                        integers.store(won, place, integers.only(winner, number, -1))
                        vectors.store(values, place, vectors.load(dy, base + j, number))

                    vectors.each(pool.columns.number, some)

            with planes() as plane, each_band(plan) as band:
                if source is None:
                    windows(plane, band, True)
                else:
                    source.fill(x, plane, band)
                    _if_finite(source, lambda finite: windows(plane, band, finite))
                grads.gather(dx, plane, band, share)

    dy, x, dx = shapes
    second = ("winners", dy, "int8") if winners else ("x", x, "float32")
    params = [("dy", dy, "float32"), second, ("dx", dx, "float32")]
    return b.prim_func("max_pool_backward", params, body)


def avg_pool(pool: Pool, shapes: Shapes, cpu: CPU, include_pad: bool) -> tirx.PrimFunc:
    """Return the kernel of average pooling.

    Parameters
    ----------
    pool, shapes, cpu
        As for :func:`max_pool`.
    include_pad : bool
        Whether padding elements count in the divisor of a window's sum.

    Returns
    -------
    function : tirx.PrimFunc
        Takes x and y.
    """
    plan, vectors = pool_plan(pool, cpu), Vectors(cpu.lanes)

    def body(x: Tensor, y: Tensor) -> None:
        with each_plane(plan) as planes:
            source = Source(plan, vectors, 0)
            with planes() as plane, each_band(plan) as band:
                source.fill(x, plane, band)
                with each_row_of_windows(pool, band) as at:
                    base, outer = pool.windows(plane, at), _outer_count(pool, at, include_pad)

                    def average(j: tirx.PrimExpr, number: Extent | None) -> None:
                        total = sum_of(source.taps(at, j))
                        count = _counts(pool, vectors, outer, j, include_pad)
                        vectors.store(y, base + j, total / count, number)

                    vectors.each(pool.columns.number, average)

    return b.prim_func("avg_pool", b.floats(("x", "y"), shapes), body)


def avg_pool_backward(pool: Pool, shapes: Shapes, cpu: CPU, include_pad: bool) -> tirx.PrimFunc:
    """Return the kernel of the gradient of average pooling.

    Parameters
    ----------
    pool, cpu, include_pad
        As for :func:`avg_pool`.
    shapes : Sequence
        The shapes of dy and dx.

    Returns
    -------
    function : tirx.PrimFunc
        Takes dy and dx.
    """
    plan, vectors = pool_plan(pool, cpu), Vectors(cpu.lanes)

    def shares(
        grads: Shares, values: tirx.Buffer, dy: Tensor, plane: tirx.PrimExpr, band: Band
    ) -> None:
        with each_row_of_windows(pool, band) as at:
            base, outer = pool.windows(plane, at), _outer_count(pool, at, include_pad)

            def share(j: tirx.PrimExpr, number: Extent | None) -> None:
                count = _counts(pool, vectors, outer, j, include_pad)
                value = vectors.load(dy, base + j, number) / count
                vectors.store(values, grads.at(at, j), vectors.only(value, number))

            vectors.each(pool.columns.number, share)

    def body(dy: Tensor, dx: Tensor) -> None:
        streamed = is_streamed(plan, (dy, dx))
        with each_plane(plan, streamed) as planes:
            grads = Shares(plan, vectors, streamed)
            values = grads.buffer(vectors, 0)
            with planes() as plane, each_band(plan) as band:
                shares(grads, values, dy, plane, band)
                grads.gather(dx, plane, band, lambda at, _tap: vectors.load(values, at))

    return b.prim_func("avg_pool_backward", b.floats(("dy", "dx"), shapes), body)


def _counts(
    pool: Pool, vectors: Vectors, outer: tirx.PrimExpr, j: tirx.PrimExpr, include_pad: bool
) -> tirx.PrimExpr:
    """Return the number of taps that count, as a vector of float32 for consecutive windows."""
    integers = Vectors(vectors.lanes, "int32")
    at = integers.splat(j) + tirx.Ramp(const(0), const(1), vectors.lanes)
    width = _count(pool.columns, at, integers.splat, include_pad)
    return tirx.Cast(f"float32x{vectors.lanes}", width * integers.splat(outer))


def _outer_count(pool: Pool, at: Sequence, include_pad: bool) -> tirx.PrimExpr:
    """Return the number of rows of taps of a window that count."""
    pairs = zip(pool.outer, at, strict=True)
    return bind(prod(_count(axis, i, const, include_pad) for axis, i in pairs))


def _count(
    windows: Windows, window: tirx.PrimExpr, splat: Callable, include_pad: bool
) -> tirx.PrimExpr:
    """Return the number of taps of a window that count: those in bounds, or with ``include_pad``
    also the padding."""
    start = window * splat(windows.stride) - splat(windows.before)
    first = start if include_pad else tirx.max(start, splat(0))
    end = windows.extent + (windows.after if include_pad else 0)
    last = tirx.min(start + splat(windows.size), splat(end))
    return tirx.max(last - first, splat(1))


def _if_finite(source: Source, emit: Callable[[bool], None]) -> None:
    """Emit ``emit(True)``, which is faster, for planes without infinities and NaN, and
    ``emit(False)`` for others."""
    b.either(source.is_finite(), lambda: emit(True), lambda: emit(False))


def _largest(vectors: Vectors, taps: Sequence, finite: bool) -> tirx.PrimExpr:
    """Return the element-wise maximum of vectors; NaN where one of them is NaN."""
    if finite:
        return _by_pairs(taps)
    result = Accumulators(vectors, 1)
    result[0] = _by_pairs(taps)
    for tap in taps:
        result[0] = tirx.Select(tirx.isnan(tap), tap, result[0])
    return result[0]


def _by_pairs(taps: Sequence) -> tirx.PrimExpr:
    """Return the element-wise maximum of vectors, by pairs; undefined where one of them is NaN."""
    taps = list(taps)
    while len(taps) > 1:
        pairs = zip(taps[::2], taps[1::2], strict=False)
        taps = [bind(tirx.max(*pair)) for pair in pairs] + taps[len(taps) // 2 * 2 :]
    return taps[0]


def _winner(
    pool: Pool, vectors: Vectors, taps: Sequence, at: Sequence, j: tirx.PrimExpr, finite: bool
) -> tirx.PrimExpr:
    """Return the winning tap of each of consecutive windows, as a vector."""
    integers, lanes = Vectors(vectors.lanes, "int32"), vectors.lanes
    largest, winner = _by_pairs(taps), Accumulators(integers, 1)
    winner[0] = integers.splat(0 if not finite else len(taps) - 1)
    # Comparisons with the maximum do not wait for each other. One of the taps equals the maximum.
    for t, tap in reversed(list(enumerate(taps[: len(taps) - finite]))):
        winner[0] = tirx.Select(tirx.EQ(tap, largest), integers.splat(t), winner[0])
    if finite:
        return winner[0]
    # If no tap exceeds negative infinity, which is also the padding, the first tap that is not
    # padding wins.
    outer = [axis.first_tap(i) for i, axis in zip(at, pool.outer, strict=True)]
    window = integers.splat(j) + tirx.Ramp(const(0), const(1), lanes)
    first = pool.columns.first_tap(window, integers.splat)
    first = integers.splat(bind(pool.tap(outer, 0))) + first
    winner[0] = tirx.max(winner[0], first)
    for t, tap in enumerate(taps):
        winner[0] = tirx.Select(tirx.isnan(tap), integers.splat(t), winner[0])
    return winner[0]
