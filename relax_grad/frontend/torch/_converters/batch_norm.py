"""Converters of batch normalisation with its running statistics.

Instance normalisation is decomposed into batch normalisation too.
"""

from __future__ import annotations

import math

from torch import fx
from tvm import relax, tirx

from ....ir.compat import dtype_of
from ....op import stop_gradient
from ....op.norm_statistics import batch_norm_statistics
from ._call import plain_extent, wide_dtype
from ._support import Importer

#: The reason for an error of PyTorch's for the same extents.
_REASON = (
    "normalisation by the statistics of a batch needs more than 1 value per channel, so that they "
    "vary"
)


def _updating(importer: Importer, node: fx.Node) -> tuple:
    """Return the result, the mean, the reciprocal standard deviation, and the new running mean and
    variance."""
    data, weight, bias, mean, variance, training, momentum, epsilon = importer.args(node)
    if not training or importer.freezes_batch_norm:
        result = _normalized(
            importer, data, weight, bias, mean, variance=variance, epsilon=epsilon, training=False
        )[0]
        return result, None, None, mean, variance
    # PyTorch leaves the running statistics as they are for no values; that is not imported.
    importer.require(_count(data) > 1, _REASON)
    result, batch_mean, batch_variance = _normalized(
        importer, data, weight, bias, mean, variance=variance, epsilon=epsilon, training=True
    )
    moved = [
        _moved(importer, mean, batch_mean, momentum),
        _moved(importer, variance, _unbiased(importer, data, batch_variance), momentum),
    ]
    for i, position in enumerate((3, 4)):
        if _is_read(node, position):  # a buffer has no gradient
            moved[i] = importer.emit(stop_gradient(moved[i]))
    return result, *_statistics(importer, node, data, epsilon), *moved


def _is_read(node: fx.Node, position: int) -> bool:
    """Tell whether the graph computes with a result, and does not only return it."""
    results = (user for user in node.users if user.args[1] == position)
    return any(user.op != "output" for result in results for user in result.users)


def _evaluating(importer: Importer, node: fx.Node) -> tuple:
    data, weight, bias, mean, variance, _, epsilon = importer.args(node)
    result = _normalized(
        importer, data, weight, bias, mean, variance=variance, epsilon=epsilon, training=False
    )[0]
    return result, None, None


def _without_statistics(importer: Importer, node: fx.Node) -> tuple:
    data, weight, bias, _, _, epsilon = importer.args(node)
    importer.require(_count(data) != 1, _REASON)
    result = _normalized(
        importer, data, weight, bias, None, variance=None, epsilon=epsilon, training=True
    )[0]
    return result, *_statistics(importer, node, data, epsilon)


def _normalized(
    importer: Importer,
    data: relax.Expr,
    weight: relax.Expr | None,
    bias: relax.Expr | None,
    mean: relax.Expr | None,
    variance: relax.Expr | None,
    epsilon: float,
    training: bool,
) -> tuple:
    """Return the normalised data, and the mean and the biased variance of each channel.

    All operands are computed in the wider of their dtypes, and in float32 if these are of half
    precision.
    """
    kind = dtype_of(data.ty)
    present = [tensor for tensor in (weight, bias, mean, variance) if tensor is not None]
    widest = wide_dtype(max([kind, *(dtype_of(tensor.ty) for tensor in present)], key=_bits))
    channels = [data.ty.shape.values[1]]

    def operand(value: relax.Expr | None, fill: float) -> relax.Expr:
        if value is None:
            return importer.emit(relax.op.full(channels, relax.const(fill, widest), widest))
        return _cast(importer, value, widest)

    operands = [
        operand(weight, 1.0),
        operand(bias, 0.0),
        operand(mean, 0.0),
        operand(variance, 1.0),
    ]
    # With momentum 1, the new running statistics are the batch's.
    call = relax.op.nn.batch_norm(
        _cast(importer, data, widest), *operands, 1, epsilon, True, True, 1.0, training
    )
    whole = importer.emit(call)
    result, *statistics = (importer.emit(relax.TupleGetItem(whole, i)) for i in range(3))
    return _cast(importer, result, kind), *statistics


def _statistics(importer: Importer, node: fx.Node, data: relax.Expr, epsilon: float) -> tuple:
    """Return the mean and the reciprocal standard deviation of each channel, if something takes
    them."""
    if not {user.args[1] for user in node.users} & {1, 2}:
        return None, None
    whole = importer.emit(batch_norm_statistics(data, 1, epsilon))
    return tuple(importer.emit(relax.TupleGetItem(whole, i)) for i in range(2))


def _moved(importer: Importer, old: relax.Expr, new: relax.Expr, momentum: float) -> relax.Expr:
    """Return the running statistic, moved towards the batch's."""
    kind = wide_dtype(dtype_of(old.ty))
    shares = [
        importer.emit(relax.op.multiply(statistic, relax.const(share, kind)))
        for statistic, share in (
            (_cast(importer, new, kind), momentum),
            (_cast(importer, old, kind), 1 - momentum),
        )
    ]
    return importer.emit(relax.op.add(*shares))


def _unbiased(importer: Importer, data: relax.Expr, variance: relax.Expr) -> relax.Expr:
    """Return the variance with Bessel's correction."""
    kind = dtype_of(variance.ty)
    count = _count(data)
    if isinstance(count, int):
        return importer.emit(relax.op.multiply(variance, relax.const(count / (count - 1), kind)))
    size = importer.emit(relax.op.shape_to_tensor(relax.ShapeExpr([count])))
    size = importer.emit(relax.op.astype(importer.emit(relax.op.reshape(size, ())), kind))
    less = importer.emit(relax.op.subtract(size, relax.const(1, kind)))
    factor = importer.emit(relax.op.divide(size, less))
    return importer.emit(relax.op.multiply(variance, factor))


def _count(data: relax.Expr) -> int | tirx.Expr:
    """Return the number of values of a channel."""
    return math.prod(
        plain_extent(extent) for i, extent in enumerate(data.ty.shape.values) if i != 1
    )


def _cast(importer: Importer, value: relax.Expr, kind: str) -> relax.Expr:
    return value if dtype_of(value.ty) == kind else importer.emit(relax.op.astype(value, kind))


def _bits(kind: str) -> int:
    return int(kind.lstrip("bfloat"))


BATCH_NORM = {
    "_native_batch_norm_legit_functional.default": _updating,
    "_native_batch_norm_legit_no_training.default": _evaluating,
    "_native_batch_norm_legit.no_stats": _without_statistics,
}
