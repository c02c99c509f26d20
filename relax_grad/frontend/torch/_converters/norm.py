"""Converters of the normalisations without running statistics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from tvm import relax

from ._call import Call, converts, dtype, extents_of, scalar, wide_dtype
from ._support import Converter

NORM: dict[str, Converter] = {}

_op = relax.op


def _affine(
    call: Call, value: relax.Expr | None, fill: float, shape: Sequence, kind: str
) -> relax.Expr:
    """Return a scale or a shift in the dtype of the computation; an absent one is neutral."""
    if value is None:
        return call.filled(shape, fill, kind)
    return call.cast(value, kind)


def _widest(*values: relax.Expr) -> str:
    kinds = [wide_dtype(dtype(tensor)) for tensor in values if tensor is not None]
    return "float64" if "float64" in kinds else kinds[0]


@converts(NORM, "layer_norm.default", "native_layer_norm.default")
def _layer_norm(
    call: Call,
    data: relax.Expr,
    normalized_shape: Sequence,
    weight: relax.Expr | None,
    bias: relax.Expr | None,
    eps: float,
    cudnn_enable: bool = True,
) -> relax.Expr | tuple:
    kind = _widest(data, weight, bias)
    rank, count = data.ty.ndim, len(normalized_shape)
    axes = list(range(rank - count, rank))
    inner = call.cast(data, kind)
    shape = extents_of(data)[rank - count :]
    scale, shift = (_affine(call, e, f, shape, kind) for e, f in ((weight, 1), (bias, 0)))
    result = call.cast(call.emit(_op.nn.layer_norm(inner, scale, shift, axes, eps)), call.dtype)
    if not isinstance(call.value, (tuple, list)):
        return result
    return result, *_statistics(call, inner, axes, eps, None)


def _statistics(
    call: Call, data: relax.Expr, axes: Sequence[int], epsilon: float, shape: Sequence | None
) -> tuple:
    """Return the mean and the reciprocal standard deviation, if another node takes them."""
    if not call.uses(1) and not call.uses(2):
        return None, None
    kind = dtype(data)
    statistics = []
    mean = call.emit(_op.mean(data, axes, True))
    variance = _op.add(_op.variance(data, axes, True), scalar(epsilon, kind))
    for i, statistic in ((1, mean), (2, call.emit(_op.rsqrt(variance)))):
        wanted = call.importer.type_of(call.value[i])
        statistics.append(
            call.cast(call.reshape(statistic, extents_of(wanted)), dtype_of_type(wanted))
        )
    return tuple(statistics)


def dtype_of_type(kind: relax.TensorType) -> str:
    """Return the dtype of a type."""
    return dtype(relax.Var("_", kind))


@converts(NORM, "group_norm.default", "native_group_norm.default")
def _group_norm(
    call: Call,
    data: relax.Expr,
    weight: relax.Expr | None,
    bias: relax.Expr | None,
    eps: float,
    num_groups: int | None = None,
    group: int | None = None,
    **_: object,
) -> relax.Expr | tuple:
    groups: Any = num_groups or group
    kind = _widest(data, weight, bias)
    inner = call.cast(data, kind)
    shape = extents_of(data)
    axes = list(range(2, len(shape)))
    count = math.prod(extent for i, extent in enumerate(shape) if i != 1) * shape[1] // groups
    call.importer.require(count != 1, "group normalisation needs more than 1 value per group")
    scale, shift = (_affine(call, e, f, [shape[1]], kind) for e, f in ((weight, 1), (bias, 0)))
    if axes:
        result = call.emit(_op.nn.group_norm(inner, scale, shift, groups, 1, axes, eps))
    else:
        inner = call.reshape(inner, [*shape, 1])
        result = call.emit(_op.nn.group_norm(inner, scale, shift, groups, 1, [2], eps))
        result = call.reshape(result, shape)
    result = call.cast(result, call.dtype)
    if not isinstance(call.value, (tuple, list)):
        return result
    if not call.uses(1) and not call.uses(2):
        return result, None, None
    parts = call.reshape(inner, [shape[0], groups, -1])
    return result, *_statistics(call, parts, [2], eps, None)


@converts(NORM, "rms_norm.default")
def _rms_norm(
    call: Call, data: relax.Expr, normalized_shape: Sequence, weight: relax.Expr | None, eps: float
) -> relax.Expr:
    kind = wide_dtype(dtype(data))
    rank, count = data.ty.ndim, len(normalized_shape)
    if eps is None:
        eps = float(np.finfo(kind).eps)
    scale = _affine(call, weight, 1, extents_of(data)[rank - count :], kind)
    axes = list(range(rank - count, rank))
    result = call.emit(_op.nn.rms_norm(call.cast(data, kind), scale, axes, eps))
    return call.cast(result, call.dtype)
