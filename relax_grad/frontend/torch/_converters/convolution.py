"""Converters of convolution, pooling and the normalisations without running statistics."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from tvm import relax

from ....op import stop_gradient
from ._call import converts, dtype, extents_of, scalar, static, wide_dtype
from ._support import Refused
from .reduction import place_of_extreme

CONVOLUTION: dict[str, Callable] = {}

_op = relax.op


def _repeated(value, rank: int) -> list:
    value = [value] if isinstance(value, int) else list(value)
    return value * rank if len(value) == 1 else value


@converts(CONVOLUTION, "convolution.default")
def _convolution(
    call, data, weight, bias, stride, padding, dilation, transposed, output_padding, groups
):
    rank = data.ty.ndim - 2
    stride, padding, dilation, extra = (
        _repeated(setting, rank) for setting in (stride, padding, dilation, output_padding)
    )
    if transposed:
        function = getattr(_op.nn, f"conv{rank}d_transpose")
        result = function(
            data, weight, stride, padding * 2, extra, dilation=dilation, groups=groups
        )
    else:
        function = getattr(_op.nn, f"conv{rank}d")
        result = function(data, weight, stride, padding * 2, dilation, groups)
    if bias is None:
        return result
    return _op.add(result, call.reshape(bias, [1, -1, *[1] * rank]))


def _batched(call, data, rank: int) -> relax.Expr:
    """Return the operand with a batch dimension."""
    return data if data.ty.ndim == rank + 2 else call.reshape(data, [1, *extents_of(data)])


def _unbatched(call, result) -> relax.Expr:
    result = call.emit(result)
    return result if result.ty.ndim == len(call.shape) else call.reshape(result, call.shape)


def _avg_pool(rank: int) -> Callable:
    def convert(
        call,
        data,
        kernel_size,
        stride,
        padding,
        ceil_mode,
        count_include_pad,
        divisor_override=None,
    ):
        kernel, padding = _repeated(kernel_size, rank), _repeated(padding, rank)
        stride = _repeated(stride, rank) if stride else kernel
        if divisor_override and ceil_mode:
            raise Refused("ceil_mode with divisor_override has no form in Relax")
        counts_all = count_include_pad or bool(divisor_override)
        kind = dtype(data)
        result = getattr(_op.nn, f"avg_pool{rank}d")(
            call.cast(_batched(call, data, rank), wide_dtype(kind)),
            kernel,
            stride,
            padding * 2,
            [1] * rank,
            ceil_mode,
            counts_all,
        )
        if divisor_override:
            factor = math.prod(kernel) / divisor_override
            result = _op.multiply(result, scalar(factor, wide_dtype(kind)))
        return call.cast(_unbatched(call, result), kind)

    return convert


def _max_pool(rank: int) -> Callable:
    def convert(call, data, kernel_size, stride, padding, dilation, ceil_mode):
        kernel = _repeated(kernel_size, rank)
        padding, dilation = _repeated(padding, rank), _repeated(dilation, rank)
        stride = _repeated(stride, rank) if stride else kernel
        if "indices" in call.node.target.__name__ and call.uses(1):
            places = [
                _window_places(*window)
                for window in zip(
                    static(extents_of(data)[-rank:]),
                    static(call.shape[-rank:]),
                    *(kernel, stride, padding, dilation),
                    strict=True,
                )
            ]
            return _maxima(call, data, places)
        result = getattr(_op.nn, f"max_pool{rank}d")(
            _batched(call, data, rank), kernel, stride, padding * 2, dilation, ceil_mode
        )
        result = _unbatched(call, result)
        return (result, None) if isinstance(call.value, (tuple, list)) else result

    return convert


def _adaptive_avg_pool(rank: int) -> Callable:
    def convert(call, data, output_size):
        kind = dtype(data)
        data = call.cast(_batched(call, data, rank), wide_dtype(kind))
        sizes = call.shape[-rank:]
        if all(size == 1 for size in sizes):
            result = _op.mean(data, list(range(2, rank + 2)), True)
        else:
            result = getattr(_op.nn, f"adaptive_avg_pool{rank}d")(data, static(sizes))
        return call.cast(_unbatched(call, result), kind)

    return convert


def _adaptive_max_pool(rank: int) -> Callable:
    def convert(call, data, output_size):
        """Take the maxima of windows that have two extents along each axis."""
        places = []
        sizes = zip(static(extents_of(data)[-rank:]), static(call.shape[-rank:]), strict=True)
        for extent, size in sizes:
            begins = np.arange(size) * extent // size
            ends = -((-np.arange(1, size + 1) * extent) // size)
            inside = begins[:, None] + np.arange(int((ends - begins).max()))
            places.append(np.minimum(inside, ends[:, None] - 1))
        return _maxima(call, data, places)

    return convert


def _window_places(extent, size, kernel, stride, padding, dilation) -> np.ndarray:
    """Return the elements of each window of an axis; those beyond the bounds are the first one within."""
    inside = np.arange(size)[:, None] * stride - padding + np.arange(kernel) * dilation
    valid = (inside >= 0) & (inside < extent)
    first = np.take_along_axis(inside, valid.argmax(1)[:, None], 1)
    return np.where(valid, inside, first)


def _maxima(call, data, places: list[np.ndarray]) -> tuple[relax.Expr, relax.Expr | None]:
    """Gather the windows, whose elements are given for each axis, and take each one's first maximum and its index."""
    rank, sizes = len(places), [len(bounds) for bounds in places]
    data = _batched(call, data, rank)
    shape = static(extents_of(data))
    flat = None
    for k, inside in enumerate(places):
        inside = inside.astype("int64")
        data = call.emit(_op.take(data, relax.const(inside), 2 + 2 * k))
        step = inside.reshape([*[1] * (2 * k), *inside.shape, *[1] * (2 * (rank - 1 - k))])
        flat = step if flat is None else flat * shape[2 + k] + step
    order = [*range(0, 2 * rank, 2), *range(1, 2 * rank, 2)]
    moved = call.emit(_op.permute_dims(data, [0, 1, *(2 + axis for axis in order)]))
    windows = call.reshape(moved, [*shape[:2], *sizes, -1])
    place = place_of_extreme(call, windows, rank + 2, True)
    value = call.emit(_op.gather_elements(windows, place, rank + 2))
    value = call.reshape(value, call.shape)
    if not call.uses(1):
        return value, None
    table = np.transpose(flat, order).reshape([1, 1, *sizes, -1])
    table = call.emit(_op.broadcast_to(relax.const(table.astype("int64")), extents_of(windows)))
    index = call.emit(_op.gather_elements(table, place, rank + 2))
    return value, call.reshape(index, call.shape)


@converts(CONVOLUTION, "max_unpool2d.default", "max_unpool3d.default")
def _max_unpool(call, data, indices, output_size, stride=None, padding=None):
    """Of windows that overlap, each has the whole gradient of the element that they have in common."""
    shape, rank = call.shape, len(output_size)
    flat = [*shape[:-rank], math.prod(static(shape[-rank:]))]
    data, indices = (
        call.reshape(tensor, [*shape[:-rank], math.prod(static(extents_of(tensor)[-rank:]))])
        for tensor in (data, indices)
    )
    none = call.emit(_op.broadcast_to(scalar(0, dtype(data)), flat))
    axis = len(flat) - 1
    fixed = call.emit(stop_gradient(data))
    value = call.emit(_op.scatter_elements(none, indices, fixed, axis, "update"))
    total = call.emit(_op.scatter_elements(none, indices, data, axis, "add"))
    change = call.emit(_op.subtract(total, call.emit(stop_gradient(total))))
    return call.reshape(call.emit(_op.add(value, change)), shape)


for _rank in (1, 2, 3):
    converts(CONVOLUTION, f"avg_pool{_rank}d.default")(_avg_pool(_rank))
    converts(CONVOLUTION, f"max_pool{_rank}d.default", f"max_pool{_rank}d_with_indices.default")(
        _max_pool(_rank)
    )
    converts(
        CONVOLUTION,
        f"adaptive_avg_pool{_rank}d.default",
        f"_adaptive_avg_pool{_rank}d.default",
    )(_adaptive_avg_pool(_rank))
    converts(CONVOLUTION, f"adaptive_max_pool{_rank}d.default")(_adaptive_max_pool(_rank))


def _affine(call, value, fill: float, shape, kind: str) -> relax.Expr:
    """Return a scale or a shift in the dtype of the computation; an absent one is neutral."""
    if value is None:
        return call.filled(shape, fill, kind)
    return call.cast(value, kind)


def _widest(*values) -> str:
    kinds = [wide_dtype(dtype(tensor)) for tensor in values if tensor is not None]
    return "float64" if "float64" in kinds else kinds[0]


@converts(CONVOLUTION, "layer_norm.default", "native_layer_norm.default")
def _layer_norm(call, data, normalized_shape, weight, bias, eps, cudnn_enable=True):
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


def _statistics(call, data, axes, epsilon: float, shape) -> tuple:
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


@converts(CONVOLUTION, "group_norm.default", "native_group_norm.default")
def _group_norm(call, data, weight, bias, eps, num_groups=None, group=None, **_):
    groups = num_groups or group
    kind = _widest(data, weight, bias)
    inner = call.cast(data, kind)
    shape = extents_of(data)
    axes = list(range(2, len(shape)))
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


@converts(CONVOLUTION, "rms_norm.default")
def _rms_norm(call, data, normalized_shape, weight, eps):
    kind = wide_dtype(dtype(data))
    rank, count = data.ty.ndim, len(normalized_shape)
    if eps is None:
        eps = float(np.finfo(kind).eps)
    scale = _affine(call, weight, 1, extents_of(data)[rank - count :], kind)
    axes = list(range(rank - count, rank))
    result = call.emit(_op.nn.rms_norm(call.cast(data, kind), scale, axes, eps))
    return call.cast(result, call.dtype)
