"""Converters of operators that move elements."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from tvm import relax, tirx

from ._call import Call, axes_of, axis_of, converts, dtype, extents_of, scalar, static
from ._support import Converter, Refused

MANIPULATE: dict[str, Converter] = {}

_op = relax.op


@converts(
    MANIPULATE,
    *("view.default", "_unsafe_view.default", "reshape.default", "flatten.using_ints"),
    *("unflatten.int", "squeeze.default", "squeeze.dim", "squeeze.dims", "unsqueeze.default"),
    *("view_as.default", "reshape_as.default"),
)
def _reshape(call: Call, data: relax.Expr, **_: object) -> relax.Expr:
    shape = call.shape
    return data if shape == extents_of(data) else _op.reshape(data, shape)


@converts(MANIPULATE, "expand.default", "broadcast_to.default", "expand_as.default")
def _expand(call: Call, data: relax.Expr, **_: object) -> relax.Expr:
    shape = call.shape
    return data if shape == extents_of(data) else _op.broadcast_to(data, shape)


@converts(MANIPULATE, "permute.default")
def _permute(call: Call, data: relax.Expr, dims: list[int]) -> relax.Expr:
    return _op.permute_dims(data, axes_of(dims, data.ty.ndim)) if dims else data


@converts(MANIPULATE, "transpose.int")
def _transpose(call: Call, data: relax.Expr, dim0: int, dim1: int) -> relax.Expr:
    rank = data.ty.ndim
    if not rank:
        return data
    axes = list(range(rank))
    dim0, dim1 = dim0 % rank, dim1 % rank
    axes[dim0], axes[dim1] = dim1, dim0
    return _op.permute_dims(data, axes)


@converts(MANIPULATE, "t.default")
def _t(call: Call, data: relax.Expr) -> relax.Expr:
    return _op.permute_dims(data, [1, 0]) if data.ty.ndim == 2 else data


@converts(MANIPULATE, "cat.default")
def _cat(call: Call, tensors: list[relax.Expr], dim: int) -> relax.Expr:
    """An empty vector joins tensors of every rank."""
    rank = len(call.shape)
    taken = [tensor for tensor in tensors if tensor.ty.ndim == rank and 0 not in extents_of(tensor)]
    taken = [call.cast(tensor, call.dtype) for tensor in taken]
    return taken[0] if len(taken) == 1 else _op.concat(taken, dim % rank)


@converts(MANIPULATE, "stack.default")
def _stack(call: Call, tensors: list[relax.Expr], dim: int) -> relax.Expr:
    rank = len(call.shape)
    return _op.stack([call.cast(tensor, call.dtype) for tensor in tensors], dim % rank)


@converts(MANIPULATE, "split.Tensor", "split_with_sizes.default", "chunk.default", "unbind.int")
def _split(call: Call, data: relax.Expr, dim: int, **_: object) -> tuple[relax.Expr, ...]:
    axis = axis_of(dim, data.ty.ndim)
    flat = call.node.target.__name__ == "unbind.int"
    kinds = [call.importer.type_of(value) for value in call.value]
    sizes = [1 if flat else extents_of(kind)[axis] for kind in kinds]
    if len(sizes) == 1:
        parts = [data]
    else:
        ends = np.cumsum(static(sizes, "the extent of its parts")).tolist()
        whole = call.emit(_op.split(data, ends[:-1], axis))
        parts = [call.item(whole, i) for i in range(len(sizes))]
    if flat:
        parts = [
            call.reshape(part, extents_of(kind)) for part, kind in zip(parts, kinds, strict=True)
        ]
    return tuple(parts)


def sliced(
    call: Call, data: relax.Expr, axis: int, begin: int, count: int | tirx.Expr, step: int = 1
) -> relax.Expr:
    """Return every ``step``-th element of an axis, ``count`` of them."""
    if count == extents_of(data)[axis] and step == 1:
        return data
    extent = extents_of(data)[axis]
    is_clamped = isinstance(count, tirx.Max)  # 0 for few rows, and then the begin is beyond them
    if is_clamped and begin != 0:
        begin = tirx.min(begin, extent)
    end = begin + (count - 1) * step + 1
    if not is_clamped:
        call.require_slice(begin, end, extent)
    result = _op.strided_slice(data, [axis], [begin], [end], [step], assume_inbound=is_clamped)
    return call.emit(result)


def begin_of(extent: int | tirx.Expr, start: int | tirx.Expr, count: int | None = None) -> int:
    """Return the begin of a slice in bounds."""
    start = 0 if start is None else start
    if isinstance(start, int) and isinstance(extent, int):
        return min(max(start + extent if start < 0 else start, 0), extent)
    if isinstance(start, int) and start < 0:
        return extent + start if count is None else extent - count
    return start


@converts(MANIPULATE, "slice.Tensor")
def _slice(
    call: Call, data: relax.Expr, dim: int, start: int | tirx.Expr, end: int | None, step: int
) -> relax.Expr:
    axis = axis_of(dim, data.ty.ndim)
    count, extent = call.shape[axis], extents_of(data)[axis]
    begin = begin_of(extent, start, count if end is None and step == 1 else None)
    return sliced(call, data, axis, begin, count, step=step)


@converts(MANIPULATE, "narrow.default")
def _narrow(
    call: Call, data: relax.Expr, dim: int, start: int | tirx.Expr, length: int | tirx.Expr
) -> relax.Expr:
    axis = axis_of(dim, data.ty.ndim)
    return sliced(call, data, axis, begin_of(extents_of(data)[axis], start), length)


@converts(MANIPULATE, "select.int")
def _select(call: Call, data: relax.Expr, dim: int, index: int | tirx.Expr) -> relax.Expr:
    axis = axis_of(dim, data.ty.ndim)
    part = sliced(call, data, axis, begin_of(extents_of(data)[axis], index), 1)
    return _op.reshape(part, call.shape)


@converts(MANIPULATE, "flip.default")
def _flip(call: Call, data: relax.Expr, dims: list[int]) -> relax.Expr:
    for axis in axes_of(dims, data.ty.ndim) if dims else []:
        data = call.emit(_op.flip(data, axis))
    return data


@converts(MANIPULATE, "roll.default")
def _roll(call: Call, data: relax.Expr, shifts: Any, dims: Any) -> relax.Expr:
    shape = extents_of(data)
    if not dims:
        size = math.prod(shape)
        flat = _rolled(call, call.reshape(data, [size]), shifts[0], 0)
        return _op.reshape(flat, shape)
    for shift, dim in zip(shifts, dims, strict=True):
        data = _rolled(call, data, shift, axis_of(dim, len(shape)))
    return data


def _rolled(call: Call, data: relax.Expr, shift: int, axis: int) -> relax.Expr:
    extent = extents_of(data)[axis]
    if not isinstance(extent, int):
        # The shift may be larger than the extent.
        places = call.emit(_op.subtract(call.numbers(extent), scalar(shift, "int64")))
        places = call.emit(_op.floor_mod(places, call.tensor(extent, "int64")))
        return call.emit(_op.take(data, places, axis))
    shift %= extent
    if shift == 0:
        return data
    first = extent - shift if shift > 0 else -shift
    parts = [
        sliced(call, data, axis, first, extent - first),
        sliced(call, data, axis, 0, first),
    ]
    return call.emit(_op.concat(parts, axis))


@converts(MANIPULATE, "repeat.default", "tile.default")
def _repeat(call: Call, data: relax.Expr, repeats: Any = None, dims: Any = None) -> relax.Expr:
    repeats = repeats if dims is None else dims
    repeats = [1] * (data.ty.ndim - len(repeats)) + list(repeats)
    shape = extents_of(data)
    shape = [1] * (len(repeats) - len(shape)) + shape
    data = call.reshape(data, shape)
    if all(isinstance(count, int) for count in repeats):
        return _op.tile(data, repeats)
    apart = [extent for pair in zip(repeats, shape, strict=True) for extent in pair]
    data = call.reshape(data, [extent for size in shape for extent in (1, size)])
    return _op.reshape(call.emit(_op.broadcast_to(data, apart)), call.shape)


@converts(MANIPULATE, "repeat_interleave.self_int")
def _repeat_interleave(
    call: Call, data: relax.Expr, repeats: int, dim: int, output_size: Any
) -> relax.Expr:
    if dim is None:
        data, dim = call.reshape(data, [math.prod(static(extents_of(data)))]), 0
    return _op.repeat(data, repeats, axis_of(dim, data.ty.ndim))


@converts(MANIPULATE, "tril.default", "triu.default")
def _triangle(call: Call, data: relax.Expr, diagonal: int) -> relax.Expr:
    function = _op.tril if "tril" in call.node.target.__name__ else _op.triu
    kind = dtype(data)
    if kind != "bool":
        return function(data, diagonal)
    return call.cast(call.emit(function(call.cast(data, "int8"), diagonal)), kind)


def _diagonal_places(offset: int, extents: list[int], count: int | tirx.Expr) -> tuple:
    """Return the begin, the end and the step of a diagonal in a flattened matrix."""
    begin = offset if offset >= 0 else -offset * extents[1]
    step = extents[1] + 1
    return begin, begin + (count - 1) * step + 1, step


@converts(MANIPULATE, "diagonal.default")
def _diagonal(call: Call, data: relax.Expr, offset: int, dim1: int, dim2: int) -> relax.Expr:
    rank, shape = data.ty.ndim, extents_of(data)
    dim1, dim2 = dim1 % rank, dim2 % rank
    rest = [axis for axis in range(rank) if axis not in (dim1, dim2)]
    moved = call.emit(_op.permute_dims(data, [*rest, dim1, dim2]))
    outer = [shape[axis] for axis in rest]
    matrix = static([shape[dim1], shape[dim2]], "the extent of its matrix")
    flat = call.reshape(moved, [*outer, matrix[0] * matrix[1]])
    begin, end, step = _diagonal_places(offset, matrix, call.shape[-1])
    return _op.strided_slice(flat, [len(outer)], [begin], [end], [step])


@converts(MANIPULATE, "diagonal_scatter.default")
def _diagonal_scatter(
    call: Call, data: relax.Expr, src: relax.Expr, offset: int, dim1: int, dim2: int
) -> relax.Expr:
    rank, shape = data.ty.ndim, extents_of(data)
    dim1, dim2 = dim1 % rank, dim2 % rank
    rest = [axis for axis in range(rank) if axis not in (dim1, dim2)]
    order = [*rest, dim1, dim2]
    outer = [shape[axis] for axis in rest]
    matrix = static([shape[dim1], shape[dim2]], "the extent of its matrix")
    flat = call.reshape(call.emit(_op.permute_dims(data, order)), [*outer, matrix[0] * matrix[1]])
    begin, end, step = _diagonal_places(offset, matrix, extents_of(src)[-1])
    written = call.emit(_op.slice_scatter(flat, src, begin, end, step, len(outer)))
    moved = call.reshape(written, [*outer, *matrix])
    return _op.permute_dims(moved, np.argsort(order).tolist())


def _places(call: Call, size: Any, stride: Any, storage_offset: int | tirx.Expr) -> np.ndarray:
    """Return the places of elements in an operand that lies in memory without gaps, as functional
    graphs have it."""
    if not call.meta()["data"].is_contiguous():
        raise Refused("its operand is not contiguous")
    size, stride = static(size), static(stride, "its stride")
    places = np.full(size, storage_offset or 0, "int64")
    for axis, (extent, step) in enumerate(zip(size, stride, strict=True)):
        steps: np.ndarray = np.arange(extent) * step
        places += steps.reshape([-1] + [1] * (len(size) - axis - 1))
    return places.reshape(-1)


@converts(MANIPULATE, "as_strided.default")
def _as_strided(
    call: Call, data: relax.Expr, size: Any, stride: list[int], storage_offset: int | tirx.Expr
) -> relax.Expr:
    places = _places(call, size, stride, storage_offset)
    flat = call.reshape(data, [math.prod(static(extents_of(data)))])
    elements = call.emit(_op.take(flat, relax.const(places), 0))
    return _op.reshape(elements, call.shape)


@converts(MANIPULATE, "as_strided_scatter.default")
def _as_strided_scatter(
    call: Call,
    data: relax.Expr,
    src: relax.Expr,
    size: Any,
    stride: list[int],
    storage_offset: int | tirx.Expr,
) -> relax.Expr:
    places = _places(call, size, stride, storage_offset)
    if len(set(places.tolist())) < len(places):
        raise Refused("it writes to an element twice, and the order is not defined")
    flat = call.reshape(data, [math.prod(static(extents_of(data)))])
    src = call.reshape(call.cast(src, dtype(data)), [len(places)])
    written = call.emit(_op.scatter_elements(flat, relax.const(places), src, 0, "update"))
    return _op.reshape(written, call.shape)


@converts(MANIPULATE, "unfold.default")
def _unfold(
    call: Call, data: relax.Expr, dimension: int, size: Any, step: int | tirx.Expr
) -> relax.Expr:
    rank = data.ty.ndim
    if not rank:
        return _op.reshape(data, call.shape)
    axis = dimension % rank
    count = static([call.shape[axis]], "the extent of its dimension")[0]
    places = np.arange(count)[:, None] * step + np.arange(size)
    elements = call.emit(_op.take(data, relax.const(places.astype("int64")), axis))
    axes = [other for other in range(rank + 1) if other != axis + 1]
    return _op.permute_dims(elements, [*axes, axis + 1])


@converts(MANIPULATE, "im2col.default")
def _im2col(
    call: Call,
    data: relax.Expr,
    kernel_size: list[int],
    dilation: list[int],
    padding: list[int],
    stride: list[int],
) -> relax.Expr:
    shape = static(extents_of(data))
    data = call.reshape(data, [-1 if len(shape) == 4 else 1, *shape[-3:]])
    if any(padding):
        data = call.emit(
            _op.nn.pad(data, [0, 0, 0, 0, padding[0], padding[0], padding[1], padding[1]])
        )
    counts = []
    for k in range(2):
        axis = 2 + 2 * k
        reach = dilation[k] * (kernel_size[k] - 1) + 1
        counts.append((shape[k - 2] + 2 * padding[k] - reach) // stride[k] + 1)
        places = np.arange(kernel_size[k])[:, None] * dilation[k] + np.arange(counts[k]) * stride[k]
        data = call.emit(_op.take(data, relax.const(places.astype("int64")), axis))
    data = call.emit(_op.permute_dims(data, [0, 1, 2, 4, 3, 5]))
    return _op.reshape(data, call.shape)


@converts(MANIPULATE, "col2im.default")
def _col2im(
    call: Call,
    data: relax.Expr,
    output_size: Any,
    kernel_size: list[int],
    dilation: list[int],
    padding: list[int],
    stride: list[int],
) -> relax.Expr:
    """A transposed convolution with one kernel element per channel."""
    kind = dtype(data)
    shape = static(call.shape)
    reach = [(k - 1) * d + 1 for k, d in zip(kernel_size, dilation, strict=True)]
    counts = [
        (o + 2 * p - r) // s + 1
        for o, p, r, s in zip(output_size, padding, reach, stride, strict=True)
    ]
    kernel = np.zeros((*kernel_size, 1, *reach))
    for i in range(kernel_size[0]):
        for j in range(kernel_size[1]):
            kernel[i, j, 0, i * dilation[0], j * dilation[1]] = 1
    number = math.prod(kernel_size)
    kernel = relax.const(kernel.reshape(number, 1, *reach), kind)
    outer = math.prod(shape[:-2])
    columns = call.reshape(data, [outer, number, *counts])
    extra = [
        o + 2 * p - r - (n - 1) * s
        for o, p, r, n, s in zip(output_size, padding, reach, counts, stride, strict=True)
    ]
    result = call.emit(_op.nn.conv2d_transpose(columns, kernel, stride, list(padding) * 2, extra))
    return _op.reshape(result, shape)


@converts(MANIPULATE, "slice_scatter.default")
def _slice_scatter(
    call: Call,
    data: relax.Expr,
    src: relax.Expr,
    dim: int,
    start: int | tirx.Expr,
    end: int | tirx.Expr | None,
    step: int,
) -> relax.Expr:
    axis = axis_of(dim, data.ty.ndim)
    extent, count = extents_of(data)[axis], extents_of(src)[axis]
    if count == 0:
        return data
    if count == extent and step == 1:
        return src
    begin = begin_of(extent, start, count if end is None and step == 1 else None)
    is_clamped = isinstance(count, tirx.Max)  # as in sliced
    if is_clamped:
        begin = tirx.min(begin, extent)
    end = begin + (count - 1) * step + 1
    if not is_clamped:
        call.require_slice(begin, end, extent)
    return _op.slice_scatter(data, src, begin, end, step, axis)


@converts(MANIPULATE, "select_scatter.default")
def _select_scatter(
    call: Call, data: relax.Expr, src: relax.Expr, dim: int, index: int | tirx.Expr
) -> relax.Expr:
    axis, shape = axis_of(dim, data.ty.ndim), extents_of(data)
    src = call.cast(call.reshape(src, [*shape[:axis], 1, *shape[axis + 1 :]]), dtype(data))
    begin = begin_of(shape[axis], index)
    call.require_slice(begin, begin + 1, shape[axis])
    return _op.slice_scatter(data, src, begin, begin + 1, 1, axis)


_MODES = {
    "constant": "constant",
    "reflect": "reflect",
    "replicate": "replicate",
    "circular": "circular",
}


def _padded(
    call: Call, data: relax.Expr, pad: list[int], mode: str, value: Any = None
) -> relax.Expr:
    """Pad the last dimensions; negative numbers take elements away."""
    rank = data.ty.ndim
    before, after = [0] * rank, [0] * rank
    for i in range(len(pad) // 2):
        before[rank - 1 - i], after[rank - 1 - i] = pad[2 * i], pad[2 * i + 1]
    for axis in range(rank):
        low, high = before[axis], after[axis]
        if min(low, high) < 0:
            extent = extents_of(data)[axis]
            cut = max(-low, 0) + max(-high, 0)
            rest = extent - cut
            if mode != "constant" and isinstance(rest, int) and rest <= 0:
                raise Refused(f"mode {mode} has no elements: dimension {axis} is cropped to none")
            data = sliced(call, data, axis, max(-low, 0), rest)
            before[axis], after[axis] = max(low, 0), max(high, 0)
    if not any(before) and not any(after):
        return data
    if mode in ("replicate", "circular"):
        for axis, extent in enumerate(extents_of(data)):
            most = max(before[axis], after[axis])
            call.require_slice(0, min(most, 1) if mode == "replicate" else most, extent)
    widths = [width for pair in zip(before, after, strict=True) for width in pair]
    kind = dtype(data)
    if kind == "bool":
        padded = _op.nn.pad(call.cast(data, "int8"), widths, mode, float(value or 0))
        return call.cast(call.emit(padded), kind)
    return _op.nn.pad(data, widths, mode, float(value or 0))


@converts(MANIPULATE, "constant_pad_nd.default", "pad.default")
def _pad(
    call: Call, data: relax.Expr, pad: list[int], value: Any, mode: str = "constant"
) -> relax.Expr:
    return _padded(call, data, pad, _MODES[mode], value)


for _rank in (1, 2, 3):
    converts(MANIPULATE, f"reflection_pad{_rank}d.default")(
        lambda call, data, padding: _padded(call, data, padding, "reflect")
    )
    converts(MANIPULATE, f"replication_pad{_rank}d.default")(
        lambda call, data, padding: _padded(call, data, padding, "replicate")
    )


@converts(MANIPULATE, "masked_scatter.default")
def _masked_scatter(
    call: Call, data: relax.Expr, mask: relax.Expr, source: relax.Expr
) -> relax.Expr:
    """The n-th true element takes the n-th element of the source."""
    shape = call.shape
    size = math.prod(static(shape))
    mask = call.emit(_op.broadcast_to(mask, shape))
    flat = call.cast(call.reshape(mask, [size]), "int64")
    places = call.emit(_op.subtract(_op.cumsum(flat, 0), scalar(1, "int64")))
    places = call.emit(_op.maximum(places, scalar(0, "int64")))
    values = call.reshape(source, [math.prod(static(extents_of(source)))])
    last = scalar(max(extents_of(values)[0] - 1, 0), "int64")
    places = call.emit(_op.minimum(places, last))
    elements = call.reshape(call.emit(_op.take(values, places, 0)), shape)
    return _op.where(mask, elements, _op.broadcast_to(data, shape))
