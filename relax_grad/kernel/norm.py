"""Normalisations and their backward operators, over rows or over channels that lie together in memory.

Each reads what it normalizes two or three times, once for each kind of statistics and once for the result, a
row or a channel at a time: a row stays in the first-level cache, a channel mostly in the second-level one.
The variance is the mean of the squared distance from the mean, as in the tensor expressions. Sums along rows
are kept in several vectors, so that no addition waits for the one before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import tirx

from ..target import CPU
from . import _builder as b
from ._builder import Extent, Sums, Vectors, as_float, bind
from .reduce import Channels, emit_column_sums

Shapes = Sequence[Sequence[Extent]]


def batch_norm(
    of: Channels,
    shapes: Shapes,
    cpu: CPU,
    epsilon: float,
    momentum: float,
    center: bool = True,
    scale: bool = True,
) -> tirx.PrimFunc:
    """Return batch_norm in training.

    Parameters
    ----------
    of : Channels
        What is normalized: each channel of it.
    shapes : Sequence
        The shapes of x and of the parameters.
    cpu : CPU
        What the function is for.
    epsilon, momentum, center, scale
        As for ``relax.op.nn.batch_norm``.

    Returns
    -------
    function : tirx.PrimFunc
        Takes x, gamma, beta, moving_mean, moving_var; then y and the new moving mean and variance.
    """
    vectors = Vectors(cpu.lanes)

    def body(x, gamma, beta, moving_mean, moving_var, y, new_mean, new_var) -> None:
        with b.parallel(0, of.channels) as c:
            mean, variance = of.moments(vectors, x, c)
            for old, value, new in (
                (moving_mean, mean, new_mean),
                (moving_var, variance, new_var),
            ):
                b.store(new, c, _f(1.0 - momentum) * old[c] + _f(momentum) * value)
            rstd = bind(_f(1.0) / tirx.sqrt(variance + _f(epsilon)))
            slope = bind(vectors.splat(rstd * gamma[c] if scale else rstd))
            shift = bind(vectors.splat(beta[c] if center else _f(0.0)))
            mean = bind(vectors.splat(mean))

            def normalize(at, number) -> None:
                vectors.store(y, at, (vectors.load(x, at, number) - mean) * slope + shift, number)

            of.each_row(c, lambda base: _each(vectors, of.inner, base, normalize))

    data, parameter = shapes
    names = ("gamma", "beta", "moving_mean", "moving_var")
    return _function(
        "batch_norm",
        [("x", data), *((name, parameter) for name in names)],
        [("y", data), ("new_mean", parameter), ("new_var", parameter)],
        body,
    )


def channel_norm_backward_data(
    of: Channels,
    shapes: Shapes,
    cpu: CPU,
    channels: Extent,
    count: Extent,
    scale: bool = True,
    name: str = "batch_norm_backward_data",
) -> tirx.PrimFunc:
    """Return the gradient of the data of batch_norm and of what is like it.

    Parameters
    ----------
    of : Channels
        The data; its channels are what has statistics of its own.
    shapes : Sequence
        The shapes of the seven tensors taken and of the result.
    cpu : CPU
        What the function is for.
    channels : int or tirx.PrimExpr
        How many factors gamma has: that of ``c`` is at ``c`` modulo this.
    count : int or tirx.PrimExpr
        The number of elements that statistics are of.
    scale : bool
        Whether there is a factor gamma.
    name : str
        The name of the function.

    Returns
    -------
    function : tirx.PrimFunc
        Takes dy, x, gamma, mean, rstd, mean_grad, variance_grad, and dx, which it sets to ``gamma * rstd * dy +
        (mean_grad + 2 * variance_grad * (x - mean)) / count``.
    """
    vectors = Vectors(cpu.lanes)
    each = as_float(count)

    def body(dy, x, gamma, mean, rstd, mean_grad, variance_grad, dx) -> None:
        with b.parallel(0, of.outer * of.channels) as row:
            c = bind(row % of.channels)
            slope = rstd[c] * gamma[c % channels] if scale else rstd[c]
            slope = bind(vectors.splat(slope))
            shift = bind(vectors.splat(mean_grad[c] / each))
            twist = bind(vectors.splat(_f(2.0) * variance_grad[c] / each))
            middle = bind(vectors.splat(mean[c]))

            def element(at, number) -> None:
                distance = vectors.load(x, at, number) - middle
                value = vectors.load(dy, at, number) * slope + (shift + distance * twist)
                vectors.store(dx, at, value, number)

            _each(vectors, of.inner, bind(row * of.inner), element)

    names = ("dy", "x", "gamma", "mean", "rstd", "mean_grad", "variance_grad", "dx")
    params = list(zip(names, shapes, strict=True))
    return _function(name, params[:-1], params[-1:], body)


def channel_norm_backward_gamma(
    of: Channels, shapes: Shapes, cpu: CPU, name: str = "batch_norm_backward_gamma"
) -> tirx.PrimFunc:
    """Return the gradient of gamma for batch_norm, or for each instance.

    Parameters
    ----------
    of, cpu, name
        As for :func:`channel_norm_backward_data`.
    shapes : Sequence
        The shapes of the four tensors taken and of the result.

    Returns
    -------
    function : tirx.PrimFunc
        Takes dy, x, mean, rstd, and the result: the sum over each channel of ``dy * (x - mean) * rstd``.
    """
    vectors = Vectors(cpu.lanes)

    def body(dy, x, mean, rstd, result) -> None:
        with b.parallel(0, of.channels) as c:
            middle = bind(vectors.splat(mean[c]))

            def product(at, number):
                # The lanes behind a row are 0 in dy, but an infinite mean must not make them NaN.
                distance = vectors.load(x, at, number) - middle
                return [vectors.only(vectors.load(dy, at, number) * distance, number)]

            (total,) = of.sums(vectors, c, 1, product)
            b.store(result, c, total * rstd[c])

    params = list(zip(("dy", "x", "mean", "rstd", "result"), shapes, strict=True))
    return _function(name, params[:-1], params[-1:], body)


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
) -> tirx.PrimFunc:
    """Return layer_norm (``inner`` is 1), instance_norm or group_norm.

    Parameters
    ----------
    rows, planes, inner : int or tirx.PrimExpr
        The data is ``[rows, planes, inner]``, each row of it normalized.
    shapes : Sequence
        The shapes of x, gamma and beta.
    cpu : CPU
        What the function is for.
    epsilon, center, scale
        As for ``relax.op.nn.layer_norm``.
    groups : int or tirx.PrimExpr
        Rows with parameters of their own, which are ``[groups, planes]``.
    name : str
        The name of the function.

    Returns
    -------
    function : tirx.PrimFunc
        Takes x, gamma, beta, and y.
    """
    vectors = Vectors(cpu.lanes)
    length = planes * inner
    row_of = Channels(1, rows, length)

    def body(x, gamma, beta, y) -> None:
        with b.parallel(0, rows) as row:
            mean, variance = row_of.moments(vectors, x, row)
            mean = bind(vectors.splat(mean))
            rstd = bind(_f(1.0) / tirx.sqrt(variance + _f(epsilon)))
            base, first = bind(row * length), bind(row % groups * planes)

            def normalize(at, number, slope, shift) -> None:
                vectors.store(y, at, (vectors.load(x, at, number) - mean) * slope + shift, number)

            if isinstance(inner, int) and inner == 1:
                wide = bind(vectors.splat(rstd))

                def along(o, number) -> None:
                    slope = wide * vectors.load(gamma, first + o, number) if scale else wide
                    shift = vectors.load(beta, first + o, number) if center else vectors.splat(0)
                    normalize(base + o, number, slope, shift)

                vectors.each(planes, along)
                return
            with b.serial(0, planes) as plane:
                at = bind(first + plane)
                slope = bind(vectors.splat(rstd * gamma[at] if scale else rstd))
                shift = bind(vectors.splat(beta[at] if center else _f(0.0)))
                start = bind(base + plane * inner)
                _each(vectors, inner, start, lambda o, n: normalize(o, n, slope, shift))

    data, *parameters = shapes
    taken = zip(("x", "gamma", "beta"), (data, *parameters), strict=True)
    return _function(name, list(taken), [("y", data)], body)


def rms_norm(rows: Extent, columns: Extent, shapes: Shapes, cpu: CPU, epsilon: float):
    """Return rms_norm of the rows of ``[rows, columns]``.

    Parameters
    ----------
    rows, columns, cpu, epsilon
        As for :func:`row_norm`.
    shapes : Sequence
        The shapes of x and of the weight.

    Returns
    -------
    function : tirx.PrimFunc
        Takes x, weight, and y: ``x * weight / sqrt(average(x**2) + epsilon)``.
    """
    vectors = Vectors(cpu.lanes)

    def body(x, weight, y) -> None:
        with b.parallel(0, rows) as row:
            base = bind(row * columns)

            def square(o, number):
                value = bind(vectors.load(x, base + o, number))
                return [value * value]

            sums = Sums(vectors)
            sums.add_row(columns, square)
            average = sums.totals()[0] / as_float(columns)
            rstd = bind(vectors.splat(_f(1.0) / tirx.sqrt(average + _f(epsilon))))

            def normalize(o, number) -> None:
                value = vectors.load(x, base + o, number) * rstd
                vectors.store(y, base + o, value * vectors.load(weight, o, number), number)

            vectors.each(columns, normalize)

    data, parameter = shapes
    return _function("rms_norm", [("x", data), ("weight", parameter)], [("y", data)], body)


def row_norm_backward_data(
    rows: Extent,
    columns: Extent,
    shapes: Shapes,
    cpu: CPU,
    centered: bool = True,
    scale: bool = True,
) -> tirx.PrimFunc:
    """Return the gradient of the data of layer_norm, or of rms_norm, which is not centered.

    Parameters
    ----------
    rows, columns : int or tirx.PrimExpr
        The data is ``[rows, columns]``, each row of it normalized.
    shapes : Sequence
        The shapes of the tensors taken and of the result.
    cpu : CPU
        What the function is for.
    centered : bool
        Whether the normalization subtracts the mean.
    scale : bool
        Whether there is a factor gamma.

    Returns
    -------
    function : tirx.PrimFunc
        Takes dy, x, gamma, mean (if centered), rstd, and dx, which it sets to ``rstd * (g - average(g) - z *
        average(g * z))`` with ``g = gamma * dy`` and ``z = (x - mean) * rstd``; without a mean, ``average(g)`` is
        left out.
    """
    vectors = Vectors(cpu.lanes)

    def body(dy, x, gamma, *rest) -> None:
        *mean, rstd, dx = rest
        with b.parallel(0, rows) as row:
            base = bind(row * columns)
            middle = bind(vectors.splat(mean[0][row])) if centered else None
            factor = bind(vectors.splat(rstd[row]))

            def g_and_z(o, number):
                grad = vectors.load(dy, base + o, number)
                grad = grad * vectors.load(gamma, o, number) if scale else grad
                value = vectors.load(x, base + o, number)
                return bind(grad), (value - middle if centered else value) * factor

            def terms(o, number):
                g, z = g_and_z(o, number)
                product = vectors.only(g * z, number)
                return [product, g] if centered else [product]

            sums = Sums(vectors, 1 + centered)
            sums.add_row(columns, terms)
            averages = [bind(vectors.splat(s / as_float(columns))) for s in sums.totals()]

            def element(o, number) -> None:
                g, z = g_and_z(o, number)
                g = g - averages[1] if centered else g
                vectors.store(dx, base + o, (g - z * averages[0]) * factor, number)

            vectors.each(columns, element)

    names = ("dy", "x", "gamma", *(["mean"] if centered else []), "rstd", "dx")
    params = list(zip(names, shapes, strict=True))
    name = "layer_norm_backward_data" if centered else "rms_norm_backward_data"
    return _function(name, params[:-1], params[-1:], body)


def row_norm_backward_gamma(
    rows: Extent, columns: int, shapes: Shapes, cpu: CPU, centered: bool = True
) -> tirx.PrimFunc:
    """Return the gradient of gamma for layer_norm, or that of the weight for rms_norm.

    Parameters
    ----------
    rows, columns, cpu, centered
        As for :func:`row_norm_backward_data`.
    shapes : Sequence
        The shapes of the tensors taken and of the result.

    Returns
    -------
    function : tirx.PrimFunc
        Takes dy, x, mean (if centered), rstd, and the result: the sum over the rows of ``dy * (x - mean) *
        rstd``.
    """
    vectors = Vectors(cpu.lanes)

    def body(dy, x, *rest) -> None:
        *mean, rstd, result = rest

        def term(row):
            middle = bind(vectors.splat(mean[0][row])) if centered else None
            factor = bind(vectors.splat(rstd[row]))

            def product(at, number):
                value = vectors.load(x, at, number)
                value = value - middle if centered else value
                return vectors.load(dy, at, number) * (value * factor)

            return product

        emit_column_sums(vectors, cpu, 1, rows, columns, term, result)

    names = ("dy", "x", *(["mean"] if centered else []), "rstd", "result")
    params = list(zip(names, shapes, strict=True))
    name = "layer_norm_backward_gamma" if centered else "rms_norm_backward_weight"
    return _function(name, params[:-1], params[-1:], body)


def _each(vectors: Vectors, extent: Extent, base, emit: Callable) -> None:
    vectors.each(extent, lambda o, number: emit(base + o, number))


def _f(value: float) -> tirx.FloatImm:
    return tirx.const(float(value), "float32")


def _function(name: str, taken: Sequence, results: Sequence, body: Callable) -> tirx.PrimFunc:
    params = [(each, shape, "float32") for each, shape in (*taken, *results)]
    return b.prim_func(name, params, body)
