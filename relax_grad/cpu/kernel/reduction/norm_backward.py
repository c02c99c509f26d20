"""Gradients of normalisations, given the statistics, over rows, or over channels that are
contiguous in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import tirx

from ...target import CPU
from ..language import builder as b
from ..language.builder import Extent, Vectors, as_float, bind
from ..language.halves import Tensor
from ..language.row_sums import Sums
from .norm import Shapes, each_of_row, number_of, with_results
from .reduce import Channels, emit_column_sums
from .sums_plan import column_sums_plan


def channel_norm_backward_data(
    of: Channels,
    shapes: Shapes,
    cpu: CPU,
    channels: Extent,
    count: Extent,
    scale: bool = True,
    name: str = "batch_norm_backward_data",
) -> tirx.PrimFunc:
    """Return the kernel of the gradient of the data of batch_norm and of similar normalisations.

    Parameters
    ----------
    of : Channels
        The data; each channel has its own statistics.
    shapes : Sequence
        The shapes of the seven operands and of the result.
    cpu : CPU
        The target CPU.
    channels : int or tirx.PrimExpr
        The number of factors of gamma: the factor of channel ``c`` is at ``c`` modulo this.
    count : int or tirx.PrimExpr
        The number of elements that each statistic covers.
    scale : bool
        Whether there is a factor gamma.
    name : str
        The name of the function.

    Returns
    -------
    function : tirx.PrimFunc
        Takes dy, x, gamma, mean, rstd, mean_grad, variance_grad, and dx, which it sets to ``gamma *
        rstd * dy + (mean_grad + 2 * variance_grad * (x - mean)) / count``.
    """
    vectors = Vectors(cpu.lanes)
    divisor = as_float(count)

    def body(
        dy: Tensor,
        x: Tensor,
        gamma: tirx.Buffer,
        mean: tirx.Buffer,
        rstd: tirx.Buffer,
        mean_grad: tirx.Buffer,
        variance_grad: tirx.Buffer,
        dx: Tensor,
    ) -> None:
        with b.parallel(0, of.outer * of.channels) as row:
            c = bind(row % of.channels)
            factor = c if channels is of.channels else c % channels
            slope = rstd[c] * gamma[factor] if scale else rstd[c]
            slope = bind(vectors.splat(slope))
            shift = bind(vectors.splat(mean_grad[c] / divisor))
            twist = bind(vectors.splat(number_of(2.0) * variance_grad[c] / divisor))
            middle = bind(vectors.splat(mean[c]))

            def element(at: tirx.PrimExpr, number: Extent | None) -> None:
                distance = vectors.load(x, at, number) - middle
                value = vectors.load(dy, at, number) * slope + (shift + distance * twist)
                vectors.store(dx, at, value, number)

            each_of_row(vectors, of.inner, bind(row * of.inner), element)

    names = ("dy", "x", "gamma", "mean", "rstd", "mean_grad", "variance_grad", "dx")
    params = list(zip(names, shapes, strict=True))
    return with_results(name, params[:-1], params[-1:], body)


def channel_norm_backward_gamma(
    of: Channels,
    shapes: Shapes,
    cpu: CPU,
    name: str = "batch_norm_backward_gamma",
    beta: Sequence[Extent] | None = None,
) -> tirx.PrimFunc:
    """Return the kernel of the gradient of gamma for batch_norm, or for each instance.

    Parameters
    ----------
    of, cpu, name
        As for :func:`channel_norm_backward_data`.
    shapes : Sequence
        The shapes of the four operands and of the result.
    beta : Sequence, optional
        The shape of an additional result: the gradient of beta, the sum of dy over each channel.

    Returns
    -------
    function : tirx.PrimFunc
        Takes dy, x, mean, rstd, and the result: the sum over each channel of
        ``dy * (x - mean) * rstd``; 0 for channels without elements.
    """
    vectors = Vectors(cpu.lanes)

    def body(
        dy: Tensor,
        x: Tensor,
        mean: tirx.Buffer,
        rstd: tirx.Buffer,
        result: tirx.Buffer,
        *of_beta: tirx.Buffer,
    ) -> None:
        with b.parallel(0, of.channels) as c:
            middle = bind(vectors.splat(mean[c]))

            def product(at: tirx.PrimExpr, number: Extent | None) -> list[tirx.PrimExpr]:
                # Lanes beyond the row are 0 in dy; they are reset to 0 because an infinite mean
                # makes them NaN.
                distance = vectors.load(x, at, number) - middle
                grad = bind(vectors.load(dy, at, number))
                return [vectors.only(grad * distance, number), *([grad] if of_beta else [])]

            total, *plain = of.sums(vectors, c, 1 + len(of_beta), product)
            # The empty sum is 0, whatever the statistics of an empty channel are.
            b.store(result, c, _where_any(of, total * rstd[c]))
            for target, value in zip(of_beta, plain, strict=True):
                b.store(target, c, value)

    params = list(zip(("dy", "x", "mean", "rstd", "result"), shapes, strict=True))
    results = [*params[-1:], *([("beta", beta)] if beta is not None else [])]
    return with_results(name, params[:-1], results, body)


def _where_any(of: Channels, value: tirx.PrimExpr) -> tirx.PrimExpr:
    """Return a value, or 0 if the channels have no elements."""
    extents = [extent for extent in (of.outer, of.inner) if not isinstance(extent, int)]
    if not extents:
        return value
    return tirx.if_then_else(tirx.all(*(extent > 0 for extent in extents)), value, number_of(0.0))


def row_norm_backward_data(
    rows: Extent,
    columns: Extent,
    shapes: Shapes,
    cpu: CPU,
    centered: bool = True,
    scale: bool = True,
) -> tirx.PrimFunc:
    """Return the kernel of the gradient of the data of layer_norm, or of rms_norm, which is not
    centered.

    Parameters
    ----------
    rows, columns : int or tirx.PrimExpr
        The data is ``[rows, columns]``; each row is normalized.
    shapes : Sequence
        The shapes of the operands and of the result.
    cpu : CPU
        The target CPU.
    centered : bool
        Whether the normalization subtracts the mean.
    scale : bool
        Whether there is a factor gamma.

    Returns
    -------
    function : tirx.PrimFunc
        Takes dy, x, gamma, mean (if centered), rstd, and dx, which it sets to
        ``rstd * (g - average(g) - z * average(g * z))`` with ``g = gamma * dy`` and
        ``z = (x - mean) * rstd``; if not centered, without ``average(g)``.
    """
    vectors = Vectors(cpu.lanes)

    def body(dy: Tensor, x: Tensor, gamma: tirx.Buffer, *rest: tirx.Buffer) -> None:
        *mean, rstd, dx = rest
        with b.parallel(0, rows) as row:
            base = bind(row * columns)
            middle = bind(vectors.splat(mean[0][row])) if centered else None
            factor = bind(vectors.splat(rstd[row]))

            def g_and_z(
                o: tirx.PrimExpr, number: Extent | None
            ) -> tuple[tirx.PrimExpr, tirx.PrimExpr]:
                grad = vectors.load(dy, base + o, number)
                grad = grad * vectors.load(gamma, o, number) if scale else grad
                value = vectors.load(x, base + o, number)
                return bind(grad), (value - middle if centered else value) * factor

            def terms(o: tirx.PrimExpr, number: Extent | None) -> list[tirx.PrimExpr]:
                g, z = g_and_z(o, number)
                product = vectors.only(g * z, number)
                return [product, g] if centered else [product]

            sums = Sums(vectors, 1 + centered)
            sums.add_row(columns, terms)
            averages = [bind(vectors.splat(s / as_float(columns))) for s in sums.totals()]

            def element(o: tirx.PrimExpr, number: Extent | None) -> None:
                g, z = g_and_z(o, number)
                g = g - averages[1] if centered else g
                vectors.store(dx, base + o, (g - z * averages[0]) * factor, number)

            vectors.each(columns, element)

    names = ("dy", "x", "gamma", *(["mean"] if centered else []), "rstd", "dx")
    params = list(zip(names, shapes, strict=True))
    name = "layer_norm_backward_data" if centered else "rms_norm_backward_data"
    return with_results(name, params[:-1], params[-1:], body)


def row_norm_backward_gamma(
    rows: Extent,
    columns: int,
    shapes: Shapes,
    cpu: CPU,
    centered: bool = True,
    beta: Sequence[Extent] | None = None,
) -> tirx.PrimFunc:
    """Return the kernel of the gradient of gamma for layer_norm, or of the weight for
    rms_norm.

    Parameters
    ----------
    rows, columns, cpu, centered
        As for :func:`row_norm_backward_data`.
    shapes : Sequence
        The shapes of the operands and of the result.
    beta : Sequence, optional
        The shape of an additional result: the gradient of beta, the sum of dy over the rows.

    Returns
    -------
    function : tirx.PrimFunc
        Takes dy, x, mean (if centered), rstd, and the result: the sum over the rows of
        ``dy * (x - mean) * rstd``.
    """
    vectors = Vectors(cpu.lanes)
    plan = column_sums_plan((1, rows, columns), cpu, operands=2)

    def body(dy: Tensor, x: Tensor, *rest: tirx.Buffer) -> None:
        mean, (rstd, *results) = rest[:centered], rest[centered:]

        def term(row: tirx.PrimExpr) -> Callable:
            middle = bind(vectors.splat(mean[0][row])) if centered else None
            factor = bind(vectors.splat(rstd[row]))

            def product(at: tirx.PrimExpr, number: Extent | None) -> list[tirx.PrimExpr]:
                value = vectors.load(x, at, number)
                value = value - middle if centered else value
                grad = bind(vectors.load(dy, at, number))
                return [grad * (value * factor), grad][: len(results)]

            return product

        emit_column_sums(plan, term, results)

    names = ("dy", "x", *(["mean"] if centered else []), "rstd", "result")
    params = list(zip(names, shapes, strict=True))
    name = "layer_norm_backward_gamma" if centered else "rms_norm_backward_weight"
    results = [*params[-1:], *([("beta", beta)] if beta is not None else [])]
    return with_results(name, params[:-1], results, body)
