"""Pooling of planes and volumes and its gradients, with indices saved by the forward pass or without.

A plane is first copied to where its padding is filled in and columns that are a stride apart lie together: so
what a tap of consecutive windows reads is a vector. For the gradient of maximum pooling, the winner of each
window is found once and kept with the window's gradient; then every element gathers from the windows that it
belongs to those that it has won. Each element is written once, and nothing depends on the order of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from tvm import tirx

from ..target import CPU
from . import builder as b
from .builder import Accumulators, Extent, Vectors, bind, const, sum_of
from .pooling import Gathered, Pool, Source, Windows

_LOWEST = float("-inf")

Shapes = Sequence[Sequence[Extent]]


def max_pool(pool: Pool, shapes: Shapes, cpu: CPU, winners: bool = False) -> tirx.PrimFunc:
    """Return maximum pooling.

    Parameters
    ----------
    pool : Pool
        What is pooled.
    shapes : Sequence
        The shapes of x and y.
    cpu : CPU
        The target CPU.
    winners : bool
        Whether there is a further result, of the shape of y: the tap that has won each window, in int8.

    Returns
    -------
    function : tirx.PrimFunc
        Takes x and y, and what receives the winners. A NaN is larger than any number.
    """
    vectors = Vectors(cpu.lanes)
    bytes_ = Vectors(cpu.lanes, "int8")

    def body(x, y, *won) -> None:
        with pool.each_plane(cpu) as planes:
            source = Source(pool, vectors, _LOWEST)

            def windows(plane, finite: bool) -> None:
                with pool.each_row_of_windows() as at:
                    base = pool.windows(plane, at)

                    def some(j, number) -> None:
                        taps = list(source.taps(at, j))
                        vectors.store(y, base + j, _largest(vectors, taps, finite), number)
                        if won:
                            winner = _winner(pool, vectors, taps, at, j, finite)
                            winner = tirx.Cast(f"int8x{vectors.lanes}", winner)
                            bytes_.store(won[0], base + j, winner, number)

                    vectors.each(pool.columns.number, some)

            with planes() as plane:
                source.fill(x, plane)
                _if_finite(source, lambda finite: windows(plane, finite))

    params = b.floats(("x", "y"), shapes)
    if winners:
        params.append(("winners", shapes[1], "int8"))
    return b.prim_func("max_pool", params, body)


def max_pool_backward(pool: Pool, shapes: Shapes, cpu: CPU, winners: bool = False) -> tirx.PrimFunc:
    """Return the gradient of maximum pooling.

    Parameters
    ----------
    pool, cpu
        As for :func:`max_pool`.
    shapes : Sequence
        The shapes of dy, x and dx.
    winners : bool
        Whether it takes the winners that :func:`max_pool` has found in the place of x.

    Returns
    -------
    function : tirx.PrimFunc
        Takes dy, x or the winners, and dx. Of equal elements the first of a window wins, and of several NaNs
        the last.
    """
    vectors = Vectors(cpu.lanes)
    bytes_ = Vectors(cpu.lanes, "int8")

    def body(dy, x, dx) -> None:
        with pool.each_plane(cpu) as planes:
            grads = Gathered(pool, vectors)
            integers = grads.integers
            source = None if winners else Source(pool, vectors, _LOWEST)
            won, values = grads.buffer(integers, -1), grads.buffer(vectors, 0)

            def share(at, tap: int):
                is_won = tirx.EQ(integers.load(won, at), integers.splat(tap))
                return tirx.Select(is_won, vectors.load(values, at), vectors.splat(0))

            def windows(plane, finite: bool) -> None:
                with pool.each_row_of_windows() as at:
                    base = pool.windows(plane, at)

                    def some(j, number) -> None:
                        if winners:
                            winner = bytes_.load(x, base + j, number)
                            winner = tirx.Cast(f"int32x{vectors.lanes}", winner)
                        else:
                            taps = list(source.taps(at, j))
                            winner = _winner(pool, vectors, taps, at, j, finite)
                        place = bind(grads.at(at, j))
                        integers.store(won, place, integers.only(winner, number, -1))
                        vectors.store(values, place, vectors.load(dy, base + j, number))

                    vectors.each(pool.columns.number, some)

            with planes() as plane:
                if winners:
                    windows(plane, True)
                else:
                    source.fill(x, plane)
                    _if_finite(source, lambda finite: windows(plane, finite))
                grads.gather(dx, plane, share)

    dy, x, dx = shapes
    second = ("winners", dy, "int8") if winners else ("x", x, "float32")
    params = [("dy", dy, "float32"), second, ("dx", dx, "float32")]
    return b.prim_func("max_pool_backward", params, body)


def avg_pool(pool: Pool, shapes: Shapes, cpu: CPU, include_pad: bool) -> tirx.PrimFunc:
    """Return average pooling.

    Parameters
    ----------
    pool, shapes, cpu
        As for :func:`max_pool`.
    include_pad : bool
        Whether the padding counts among what a window's sum is divided by.

    Returns
    -------
    function : tirx.PrimFunc
        Takes x and y.
    """
    vectors = Vectors(cpu.lanes)

    def body(x, y) -> None:
        with pool.each_plane(cpu) as planes:
            source = Source(pool, vectors, 0)
            with planes() as plane:
                source.fill(x, plane)
                with pool.each_row_of_windows() as at:
                    base, outer = pool.windows(plane, at), _outer_count(pool, at, include_pad)

                    def average(j, number) -> None:
                        total = sum_of(source.taps(at, j))
                        count = _counts(pool, vectors, outer, j, include_pad)
                        vectors.store(y, base + j, total / count, number)

                    vectors.each(pool.columns.number, average)

    return b.prim_func("avg_pool", b.floats(("x", "y"), shapes), body)


def avg_pool_backward(pool: Pool, shapes: Shapes, cpu: CPU, include_pad: bool) -> tirx.PrimFunc:
    """Return the gradient of average pooling.

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
    vectors = Vectors(cpu.lanes)

    def shares(grads: Gathered, values, dy, plane) -> None:
        with pool.each_row_of_windows() as at:
            base, outer = pool.windows(plane, at), _outer_count(pool, at, include_pad)

            def share(j, number) -> None:
                count = _counts(pool, vectors, outer, j, include_pad)
                value = vectors.load(dy, base + j, number) / count
                vectors.store(values, grads.at(at, j), vectors.only(value, number))

            vectors.each(pool.columns.number, share)

    def body(dy, dx) -> None:
        with pool.each_plane(cpu) as planes:
            grads = Gathered(pool, vectors)
            values = grads.buffer(vectors, 0)
            with planes() as plane:
                shares(grads, values, dy, plane)
                grads.gather(dx, plane, lambda at, _tap: vectors.load(values, at))

    return b.prim_func("avg_pool_backward", b.floats(("dy", "dx"), shapes), body)


def _counts(pool: Pool, vectors: Vectors, outer, j, include_pad: bool):
    """Return how many taps of consecutive windows count, as floats."""
    integers = Vectors(vectors.lanes, "int32")
    at = integers.splat(j) + tirx.Ramp(const(0), const(1), vectors.lanes)
    width = _count(pool.columns, at, integers.splat, include_pad)
    return tirx.Cast(f"float32x{vectors.lanes}", width * integers.splat(outer))


def _outer_count(pool: Pool, at: Sequence, include_pad: bool):
    """Return how many rows of taps of a window count."""
    pairs = zip(pool.outer, at, strict=True)
    return bind(prod(_count(axis, i, const, include_pad) for axis, i in pairs))


def _count(windows: Windows, window, splat: Callable, include_pad: bool):
    """Return how many taps of a window count: those inside of the data, or of the padding as well."""
    start = window * splat(windows.stride) - splat(windows.before)
    first = start if include_pad else tirx.max(start, splat(0))
    end = windows.extent + (windows.after if include_pad else 0)
    last = tirx.min(start + splat(windows.size), splat(end))
    return tirx.max(last - first, splat(1))


def _if_finite(source: Source, emit: Callable[[bool], None]) -> None:
    """Emit what is done with a plane that has infinities or NaN, and what without, which is faster."""
    b.either(source.is_finite(), lambda: emit(True), lambda: emit(False))


def _largest(vectors: Vectors, taps: Sequence, finite: bool):
    """Return the largest of some vectors, or a NaN."""
    if finite:
        return _by_pairs(taps)
    result = Accumulators(vectors, 1)
    result[0] = _by_pairs(taps)
    for tap in taps:
        result[0] = tirx.Select(tirx.isnan(tap), tap, result[0])
    return result[0]


def _by_pairs(taps: Sequence):
    """Return the largest of some vectors, anything where there is a NaN, by pairs."""
    taps = list(taps)
    while len(taps) > 1:
        pairs = zip(taps[::2], taps[1::2], strict=False)
        taps = [bind(tirx.max(*pair)) for pair in pairs] + taps[len(taps) // 2 * 2 :]
    return taps[0]


def _winner(pool: Pool, vectors: Vectors, taps: Sequence, at: Sequence, j, finite: bool):
    """Return which tap wins each of some windows."""
    integers, lanes = Vectors(vectors.lanes, "int32"), vectors.lanes
    largest, winner = _by_pairs(taps), Accumulators(integers, 1)
    winner[0] = integers.splat(0 if not finite else len(taps) - 1)
    # Nothing here waits for a comparison of the tap before. One of them is the largest number.
    for t, tap in reversed(list(enumerate(taps[: len(taps) - finite]))):
        winner[0] = tirx.Select(tirx.EQ(tap, largest), integers.splat(t), winner[0])
    if finite:
        return winner[0]
    # Where nothing is above negative infinity, which padding is too, the first that is no padding wins.
    outer = [axis.first_tap(i) for i, axis in zip(at, pool.outer, strict=True)]
    window = integers.splat(j) + tirx.Ramp(const(0), const(1), lanes)
    first = pool.columns.first_tap(window, integers.splat)
    first = integers.splat(bind(pool.tap(outer, 0))) + first
    winner[0] = tirx.max(winner[0], first)
    for t, tap in enumerate(taps):
        winner[0] = tirx.Select(tirx.isnan(tap), integers.splat(t), winner[0])
    return winner[0]
