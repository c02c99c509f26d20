"""Normalisations over rows, or over channels that are contiguous in memory, and their statistics.

Each reads its operand two or three times, a row or a channel at a time: once for each statistic,
and once for the result. A row stays in the first-level cache, a channel mostly in the second-level
one. The variance is the mean of the squared distance from the mean, as in the tensor expressions.
Sums along rows are kept in several vectors, so that an addition does not wait for the previous one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import tirx

from ...target import CPU
from ..language import builder as b
from ..language.builder import Extent, Vectors, as_float, bind
from ..language.halves import Tensor, rectified
from ..language.row_sums import Sums
from ..language.statements import Emit
from .reduce import Channels

Shapes = Sequence[Sequence[Extent]]


def batch_norm(
    of: Channels,
    shapes: Shapes,
    cpu: CPU,
    epsilon: float,
    momentum: float,
    center: bool = True,
    scale: bool = True,
    statistics: Sequence[Extent] | None = None,
    rectifies: bool = False,
) -> tirx.PrimFunc:
    """Return the kernel of batch_norm in training.

    Parameters
    ----------
    of : Channels
        The data; each channel is normalized.
    shapes : Sequence
        The shapes of x and of the parameters.
    cpu : CPU
        The target CPU.
    epsilon, momentum, center, scale
        As for ``relax.op.nn.batch_norm``.
    statistics : Sequence, optional
        The shape of two additional results: the mean, and 1 / sqrt(variance + epsilon).
    rectifies : bool
        Whether y is ReLU of the normalised data; NaN stays NaN.

    Returns
    -------
    function : tirx.PrimFunc
        Takes x, gamma, beta, moving_mean, moving_var; then y and the new moving mean and variance.
    """
    vectors = Vectors(cpu.lanes)

    def body(
        x: Tensor,
        gamma: tirx.Buffer,
        beta: tirx.Buffer,
        moving_mean: tirx.Buffer,
        moving_var: tirx.Buffer,
        y: Tensor,
        new_mean: tirx.Buffer,
        new_var: tirx.Buffer,
        *saved: tirx.Buffer,
    ) -> None:
        with b.parallel(0, of.channels) as c:
            mean, variance = of.moments(vectors, x, c)
            for old, value, new in (
                (moving_mean, mean, new_mean),
                (moving_var, variance, new_var),
            ):
                b.store(new, c, number_of(1.0 - momentum) * old[c] + number_of(momentum) * value)
            rstd = _reciprocal_deviation(variance, epsilon)
            _save(saved, c, 1, mean, rstd)
            slope = bind(vectors.splat(rstd * gamma[c] if scale else rstd))
            shift = bind(vectors.splat(beta[c] if center else number_of(0.0)))
            mean = bind(vectors.splat(mean))

            def normalize(at: tirx.PrimExpr, number: Extent | None) -> None:
                value = (vectors.load(x, at, number) - mean) * slope + shift
                vectors.store(y, at, _rectified(vectors, value, rectifies), number)

            of.each_row(c, lambda base: each_of_row(vectors, of.inner, base, normalize))

    data, parameter = shapes
    names = ("gamma", "beta", "moving_mean", "moving_var")
    return with_results(
        "batch_norm",
        [("x", data), *((name, parameter) for name in names)],
        [("y", data), ("new_mean", parameter), ("new_var", parameter), *_saved(statistics)],
        body,
    )


def row_norm(
    rows: Extent,
    planes: Extent,
    inner: Extent,
    shapes: Shapes,
    cpu: CPU,
    epsilon: float,
    groups: Extent = 1,
    center: bool = True,
    scale: bool = True,
    name: str = "layer_norm",
    statistics: Sequence[Extent] | None = None,
    copies: Extent = 1,
    rectifies: bool = False,
) -> tirx.PrimFunc:
    """Return the kernel of layer_norm (``inner`` is 1), instance_norm or group_norm.

    Parameters
    ----------
    rows, planes, inner : int or tirx.PrimExpr
        The data is ``[rows, planes, inner]``; each row is normalized.
    shapes : Sequence
        The shapes of x, gamma and beta.
    cpu : CPU
        The target CPU.
    epsilon, center, scale
        As for ``relax.op.nn.layer_norm``.
    groups : int or tirx.PrimExpr
        The number of rows with their own parameters, which are ``[groups, planes]``.
    name : str
        The name of the function.
    statistics, rectifies
        As for :func:`batch_norm`.
    copies : int or tirx.PrimExpr
        The number of elements that hold the statistics of a row.

    Returns
    -------
    function : tirx.PrimFunc
        Takes x, gamma, beta, and y.
    """
    vectors = Vectors(cpu.lanes)
    length = planes * inner
    row_of = Channels(1, rows, length)

    def body(
        x: Tensor, gamma: tirx.Buffer, beta: tirx.Buffer, y: Tensor, *saved: tirx.Buffer
    ) -> None:
        with b.parallel(0, rows) as row:
            mean, variance = row_of.moments(vectors, x, row)
            rstd = _reciprocal_deviation(variance, epsilon)
            _save(saved, row, copies, mean, rstd)
            mean = bind(vectors.splat(mean))
            base, first = bind(row * length), bind(row % groups * planes)

            def normalize(
                at: tirx.PrimExpr, number: Extent | None, slope: tirx.PrimExpr, shift: tirx.PrimExpr
            ) -> None:
                value = (vectors.load(x, at, number) - mean) * slope + shift
                vectors.store(y, at, _rectified(vectors, value, rectifies), number)

            if isinstance(inner, int) and inner == 1:
                wide = bind(vectors.splat(rstd))

                def along(o: tirx.PrimExpr, number: int) -> None:
                    slope = wide * vectors.load(gamma, first + o, number) if scale else wide
                    shift = vectors.load(beta, first + o, number) if center else vectors.splat(0)
                    normalize(base + o, number, slope, shift)

                vectors.each(planes, along)
                return
            with b.serial(0, planes) as plane:
                at = bind(first + plane)
                slope = bind(vectors.splat(rstd * gamma[at] if scale else rstd))
                shift = bind(vectors.splat(beta[at] if center else number_of(0.0)))
                start = bind(base + plane * inner)
                each_of_row(vectors, inner, start, lambda o, n: normalize(o, n, slope, shift))

    data, *parameters = shapes
    taken = zip(("x", "gamma", "beta"), (data, *parameters), strict=True)
    return with_results(name, list(taken), [("y", data), *_saved(statistics)], body)


def rms_norm(
    rows: Extent,
    columns: Extent,
    shapes: Shapes,
    cpu: CPU,
    epsilon: float,
    statistics: Sequence[Extent] | None = None,
) -> tirx.PrimFunc:
    """Return the kernel of rms_norm of the rows of ``[rows, columns]``.

    Parameters
    ----------
    rows, columns, cpu, epsilon
        As for :func:`row_norm`.
    statistics : Sequence, optional
        The shape of an additional result: ``1 / sqrt(average(x**2) + epsilon)``.
    shapes : Sequence
        The shapes of x and of the weight.

    Returns
    -------
    function : tirx.PrimFunc
        Takes x, weight, and y: ``x * weight / sqrt(average(x**2) + epsilon)``.
    """
    vectors = Vectors(cpu.lanes)

    def body(x: Tensor, weight: Tensor, y: Tensor, *saved: tirx.Buffer) -> None:
        with b.parallel(0, rows) as row:
            base = bind(row * columns)
            rstd = _reciprocal_deviation(_mean_square(vectors, x, base, columns), epsilon)
            _save(saved, row, 1, rstd)
            rstd = bind(vectors.splat(rstd))

            def normalize(o: tirx.PrimExpr, number: Extent | None) -> None:
                value = vectors.load(x, base + o, number) * rstd
                vectors.store(y, base + o, value * vectors.load(weight, o, number), number)

            vectors.each(columns, normalize)

    data, parameter = shapes
    results = [("y", data), *_saved(statistics, ["rstd"])]
    return with_results("rms_norm", [("x", data), ("weight", parameter)], results, body)


def statistics(
    of: Channels,
    shapes: Shapes,
    cpu: CPU,
    epsilon: float,
    center: bool = True,
    copies: Extent = 1,
) -> tirx.PrimFunc:
    """Return the kernel of the statistics of a normalisation.

    Parameters
    ----------
    of : Channels
        The data; each channel has its own statistics. Without ``center``, ``outer`` is 1.
    shapes : Sequence
        The shapes of x and of each statistic.
    cpu, epsilon, copies
        As for :func:`row_norm`.
    center : bool
        Whether the mean is subtracted, and is a result.

    Returns
    -------
    function : tirx.PrimFunc
        Takes x; then the mean, if ``center``, and ``1 / sqrt(variance + epsilon)``.
    """
    vectors = Vectors(cpu.lanes)

    def body(x: Tensor, *saved: tirx.Buffer) -> None:
        with b.parallel(0, of.channels) as c:
            if center:
                mean, variance = of.moments(vectors, x, c)
                values: tuple[tirx.PrimExpr, ...] = mean, _reciprocal_deviation(variance, epsilon)
            else:
                variance = _mean_square(vectors, x, bind(c * of.inner), of.inner)
                values = (_reciprocal_deviation(variance, epsilon),)
            _save(saved, c, copies, *values)

    data, shape = shapes
    names = ("mean", "rstd") if center else ("rstd",)
    return with_results("norm_statistics", [("x", data)], _saved(shape, names), body)


def _reciprocal_deviation(variance: tirx.PrimExpr, epsilon: float) -> tirx.Var:
    """Return ``1 / sqrt(variance + epsilon)``."""
    return bind(number_of(1.0) / tirx.sqrt(variance + number_of(epsilon)))


def _rectified(vectors: Vectors, value: tirx.PrimExpr, rectifies: bool) -> tirx.PrimExpr:
    """Return ReLU of a vector, or the vector."""
    return rectified(value, vectors.lanes) if rectifies else value


def _mean_square(
    vectors: Vectors, x: tirx.Buffer, base: tirx.PrimExpr, columns: Extent
) -> tirx.PrimExpr:
    """Return the mean of the squares of a row that begins at index ``base``."""

    def square(o: tirx.PrimExpr, number: Extent | None) -> list[tirx.PrimExpr]:
        value = bind(vectors.load(x, base + o, number))
        return [value * value]

    sums = Sums(vectors)
    sums.add_row(columns, square)
    return sums.totals()[0] / as_float(columns)


def _saved(shape: Sequence[Extent] | None, names: Sequence[str] = ("mean", "rstd")) -> list:
    """Return the parameters for saved statistics."""
    return [] if shape is None else [(f"saved_{name}", shape) for name in names]


def _save(
    saved: Sequence[tirx.Buffer], row: tirx.PrimExpr, copies: Extent, *values: tirx.PrimExpr
) -> None:
    """Store the statistics of a row in each of its elements, if they are saved."""
    for buffer, value in zip(saved, values, strict=False):
        if isinstance(copies, int) and copies == 1:
            b.store(buffer, row, value)
        else:
            with b.serial(0, copies) as copy:
                b.store(buffer, row * copies + copy, value)


def each_of_row(vectors: Vectors, extent: Extent, base: tirx.PrimExpr, emit: Emit) -> None:
    """Emit ``emit(index, number)`` for each vector of a row that begins at index ``base``."""
    vectors.each(extent, lambda o, number: emit(base + o, number))


def number_of(value: float) -> tirx.FloatImm:
    """Return a float32 constant."""
    return tirx.const(float(value), "float32")


def with_results(name: str, taken: Sequence, results: Sequence, body: Callable) -> tirx.PrimFunc:
    """Return a function of float32 tensors, given the names and shapes of its operands and
    results."""
    return b.prim_func(name, b.floats(*zip(*taken, *results, strict=True)), body)
