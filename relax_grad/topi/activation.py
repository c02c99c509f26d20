"""Tensor expressions of the activations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import te, tirx, topi

from ..ir.dtypes import accumulation_dtype
from .util import analyzer_of_extents, is_empty, zeros


def prelu(data: te.Tensor, alpha: te.Tensor, axis: int) -> te.Tensor:
    """Multiply non-positive elements by a slope: one for all, or one for each position along an
    axis.

    Parameters
    ----------
    data : te.Tensor
        A tensor of any shape, static or symbolic.
    alpha : te.Tensor
        The slopes: of shape ``(1,)``, or ``(n,)`` with the extent of the data along the axis.
    axis : int
        The axis; a negative one counts from the end.

    Returns
    -------
    result : te.Tensor
        A tensor of the shape and dtype of the data.

    Raises
    ------
    ValueError
        If the slopes do not fit the data.
    """
    extent = data.shape[axis]
    if len(alpha.shape) != 1:
        raise ValueError(f"prelu: alpha must have one dimension, but its shape is {alpha.shape}")
    analyzer = analyzer_of_extents([alpha.shape[0], extent])
    shared = analyzer.can_prove_equal(alpha.shape[0], 1)
    if not shared and not analyzer.can_prove_equal(alpha.shape[0], extent):
        raise ValueError(
            f"prelu: alpha must have the extent 1 or {extent}, as the data along axis "
            f"{axis}, but it has {alpha.shape[0]}"
        )

    def element(*index: tirx.PrimExpr) -> tirx.PrimExpr:
        value = data(*index)
        slope = alpha[0] if shared else alpha(index[axis])
        return tirx.Select(value > 0, value, value * slope)

    return te.compute(data.shape, element, name="prelu", tag=topi.tag.BROADCAST)


def softmax_backward(output_grad: te.Tensor, output: te.Tensor, axis: int) -> te.Tensor:
    """Gradient of softmax, computed from its result.

    Parameters
    ----------
    output_grad : te.Tensor
        The gradient with respect to the result.
    output : te.Tensor
        The result of softmax, of the same shape.
    axis : int
        The axis, not negative.

    Returns
    -------
    result : te.Tensor
        ``(dy - sum(dy * y)) * y`` with the sum over the axis; of the shape and the dtype of
        ``output_grad``, computed in float32 at least.
    """
    return _of_rows(
        output_grad,
        output,
        axis,
        lambda dy, y: dy * y,
        lambda dy, y, total: (dy - total) * y,
        name="softmax_backward",
    )


def log_softmax_backward(output_grad: te.Tensor, output: te.Tensor, axis: int) -> te.Tensor:
    """Gradient of log_softmax, computed from its result.

    Parameters
    ----------
    output_grad, output, axis
        As for :func:`softmax_backward`, with the result of log_softmax.

    Returns
    -------
    result : te.Tensor
        ``dy - sum(dy) * exp(y)`` with the sum over the axis; of the shape and the dtype of
        ``output_grad``, computed in float32 at least.
    """
    return _of_rows(
        output_grad,
        output,
        axis,
        lambda dy, _: dy,
        lambda dy, y, total: dy - total * tirx.exp(y),
        name="log_softmax_backward",
    )


def _of_rows(
    output_grad: te.Tensor,
    output: te.Tensor,
    axis: int,
    term: Callable[[tirx.PrimExpr, tirx.PrimExpr], tirx.PrimExpr],
    element: Callable[[tirx.PrimExpr, tirx.PrimExpr, tirx.PrimExpr], tirx.PrimExpr],
    name: str,
) -> te.Tensor:
    """Return ``element(dy, y, total)`` with the sums ``total`` of ``term(dy, y)`` over the axis."""
    shape = output_grad.shape
    if is_empty(shape):
        return zeros(shape, output_grad.dtype)
    dtype = accumulation_dtype(output_grad.dtype, output.dtype)
    k = te.reduce_axis((0, shape[axis]), "k")

    def at(i: Sequence[tirx.PrimExpr]) -> tuple[tirx.PrimExpr, tirx.PrimExpr]:
        return output_grad(*i).astype(dtype), output(*i).astype(dtype)

    total = te.compute(
        [*shape[:axis], *shape[axis + 1 :]],
        lambda *row: te.sum(term(*at((*row[:axis], k, *row[axis:]))), axis=k),
        name="row_total",
    )

    def value(*i: tirx.PrimExpr) -> tirx.PrimExpr:
        dy, y = at(i)
        return element(dy, y, total(*i[:axis], *i[axis + 1 :])).astype(output_grad.dtype)

    return te.compute(shape, value, name=name)
