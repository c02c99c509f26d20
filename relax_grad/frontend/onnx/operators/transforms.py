"""Converters of Fourier transforms, determinants, and operators on patches."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from tvm import relax, tirx
from tvm.relax import op

from ..extents.values import Known, is_symbolic, objects
from .converters import (
    Attrs,
    Builder,
    Inputs,
    Refused,
    Result,
    _constant,
    _converts,
    _dtype,
    _extents,
    _like,
    _rank,
)
from .symbolic import arithmetic, tensor_of

#: The longest Fourier transform, whose matrix has the square of elements.
_LONGEST = 4096

#: The largest matrix of a determinant, which is written out by rows.
_MOST_ROWS = 64


def _known(extent: tirx.Expr | int, what: str) -> int:
    if is_symbolic(extent):
        raise Refused(f"{what} is {extent}; give the extents of the inputs: shapes={{...}}")
    return int(extent)


def _basis(length: int, count: int, dtype: str) -> tuple[relax.Expr, relax.Expr]:
    """Return cosines and sines of ``2 pi n k / length``, in the layout (n, k)."""
    turns = np.outer(np.arange(length), np.arange(count)) % length
    angles = 2 * math.pi * turns / length
    return relax.const(np.cos(angles), dtype), relax.const(np.sin(angles), dtype)


def _transformed(bb: Builder, parts: list, length: int, count: int, inverse: bool) -> list:
    """Return the real and the imaginary part of the transform along the last axis; a real operand
    has one part."""
    cosines, sines = _basis(length, count, _dtype(parts[0]))
    real = bb.emit(op.matmul(parts[0], cosines))
    imaginary = bb.emit(op.matmul(parts[0], sines))
    sign = 1 if inverse else -1
    if sign < 0:
        imaginary = bb.emit(op.negative(imaginary))
    if len(parts) > 1:
        of_sines = bb.emit(op.matmul(parts[1], sines))
        real = bb.emit((op.subtract if inverse else op.add)(real, of_sines))
        imaginary = bb.emit(op.add(imaginary, bb.emit(op.matmul(parts[1], cosines))))
    return [real, imaginary]


def _real_signal(bb: Builder, parts: list, length: int) -> relax.Expr:
    """Return the real signal of a half of its spectrum along the last axis.

    The other half are the conjugate numbers, so that all frequencies count twice but the first, and
    the middle one of an even length.
    """
    count = length // 2 + 1
    shares = np.full((count, 1), 2 / length)
    shares[0] = 1 / length
    if length % 2 == 0:
        shares[-1] = 1 / length
    angles = 2 * math.pi * (np.outer(np.arange(count), np.arange(length)) % length) / length
    dtype = _dtype(parts[0])
    bases = [shares * np.cos(angles), -shares * np.sin(angles)]
    terms = [
        bb.emit(op.matmul(part, relax.const(basis, dtype)))
        for part, basis in zip(parts, bases, strict=False)
    ]
    return terms[0] if len(terms) == 1 else bb.emit(op.add(*terms))


@_converts("DFT")
def _dft(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """The discrete Fourier transform along an axis, as a product with a matrix; the last axis holds
    the parts of a number."""
    data, rank = inputs[0], _rank(inputs[0])
    if opset >= 20:
        axis = -2 if inputs[2] is None else int(_constant(inputs[2], "axis").item())
    else:
        axis = attrs.get("axis", 1)
    axis %= rank
    inverse, one_sided = bool(attrs.get("inverse", 0)), bool(attrs.get("onesided", 0))
    extent = _known(_extents(data)[axis], "the extent of its axis")
    length = 2 * (extent - 1) if inverse and one_sided else extent
    if inputs[1] is not None:
        length = int(_constant(inputs[1], "dft_length").item())
    if length > _LONGEST:
        raise Refused(f"its length is {length}; transforms of at most {_LONGEST} are supported")
    if length < 1:
        raise Refused(f"its length is {length}; it must be positive: give dft_length")
    # A half of the spectrum has the frequencies from 0 to half the length.
    taken = length // 2 + 1 if inverse and one_sided else length
    if taken < extent:
        data = bb.emit(op.strided_slice(data, [axis], [0], [taken], [1]))
    elif taken > extent:
        widths = [0] * (2 * rank)
        widths[2 * axis + 1] = taken - extent
        data = bb.emit(op.nn.pad(data, widths))
    parts = _known(_extents(data)[-1], "the extent of its last axis")
    order = [dim for dim in range(rank - 1) if dim != axis] + [axis]
    pieces = []
    for i in range(parts):
        piece = data
        if parts > 1:
            piece = bb.emit(op.strided_slice(data, [rank - 1], [i], [i + 1], [1]))
        piece = bb.emit(op.squeeze(piece, [rank - 1]))
        pieces.append(bb.emit(op.permute_dims(piece, order)))
    back = [order.index(dim) for dim in range(rank - 1)]
    if inverse and one_sided:
        signal = bb.emit(op.permute_dims(_real_signal(bb, pieces, length), back))
        return op.expand_dims(signal, rank - 1)
    count = length // 2 + 1 if one_sided else length
    spectrum = _transformed(bb, pieces, length, count, inverse)
    spectrum = [bb.emit(op.permute_dims(part, back)) for part in spectrum]
    result = bb.emit(op.stack(spectrum, rank - 1))
    return op.multiply(result, _like(1 / length, result)) if inverse else result


@_converts("STFT")
def _stft(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """The Fourier transforms of windows of a signal, of shape (batch, frames, frequencies, 2)."""
    signal, step, window, length = (inputs[i] for i in range(4))
    step = int(_constant(step, "frame_step").item())
    if length is not None:
        length = int(_constant(length, "frame_length").item())
    elif window is not None:
        length = _known(_extents(window)[0], "the length of its window")
    else:
        raise Refused("it has neither a window nor frame_length")
    if length > _LONGEST:
        raise Refused(
            f"its frame_length is {length}; transforms of at most {_LONGEST} are supported"
        )
    extents = arithmetic(attrs)
    steps = _extents(signal)[1]
    frames = extents.add(extents.quotient([extents.subtract(steps, length)], [step]), 1)
    starts = bb.emit(op.arange(0, frames, 1, "int64"))
    starts = bb.emit(op.multiply(starts, relax.const(step, "int64")))
    offsets = relax.const(np.arange(length), "int64")
    places = bb.emit(op.add(bb.emit(op.expand_dims(starts, 1)), offsets))
    parts, pieces = 1, [signal]
    if _rank(signal) == 3:
        parts = _known(_extents(signal)[2], "the extent of its last axis")
        pieces = [
            bb.emit(op.squeeze(bb.emit(op.strided_slice(signal, [2], [i], [i + 1], [1])), [2]))
            for i in range(parts)
        ]
    one_sided = bool(attrs.get("onesided", 1))
    if one_sided and parts > 1:
        raise Refused("it is onesided, and its signal complex; export it with onesided=0")
    rows = []
    for piece in pieces:
        row = bb.emit(op.take(piece, places, 1))
        rows.append(row if window is None else bb.emit(op.multiply(row, window)))
    count = length // 2 + 1 if one_sided else length
    return op.stack(_transformed(bb, rows, length, count, False), 3)


@_converts("Det")
def _determinant(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """The determinant: by its definition up to 3 rows, and else by elimination with the largest
    pivots."""
    data, rank = inputs[0], _rank(inputs[0])
    rows = _known(_extents(data)[-1], "the number of its rows")
    if rows > _MOST_ROWS:
        raise Refused(f"its matrices have {rows} rows; at most {_MOST_ROWS} are supported")
    axes = [rank - 2, rank - 1]

    def part(matrix: relax.Expr, first: tuple[int, int], last: tuple[int, int]) -> relax.Expr:
        starts, ends = zip(first, last, strict=True)
        return bb.emit(op.strided_slice(matrix, axes, list(starts), list(ends), [1, 1]))

    def element(i: int, j: int) -> relax.Expr:
        return bb.emit(op.squeeze(part(data, (i, i + 1), (j, j + 1)), axes))

    def product(*factors: relax.Expr) -> relax.Expr:
        result = factors[0]
        for factor in factors[1:]:
            result = bb.emit(op.multiply(result, factor))
        return result

    if rows <= 3:
        result: relax.Expr | None = None
        for order, sign in _PERMUTATIONS[rows]:
            term = product(*(element(i, j) for i, j in enumerate(order)))
            if result is None:
                result = term
            else:
                result = bb.emit((op.add if sign > 0 else op.subtract)(result, term))
        return result
    return _eliminated(bb, data, rows, part)


_PERMUTATIONS: dict[int, list[tuple[tuple[int, ...], int]]] = {
    1: [((0,), 1)],
    2: [((0, 1), 1), ((1, 0), -1)],
    3: [
        ((0, 1, 2), 1),
        ((1, 2, 0), 1),
        ((2, 0, 1), 1),
        ((2, 1, 0), -1),
        ((1, 0, 2), -1),
        ((0, 2, 1), -1),
    ],
}


def _eliminated(bb: Builder, data: relax.Expr, rows: int, part: Callable) -> relax.Expr:
    """Return the determinant as the product of the pivots, of which each is the largest element of
    its column."""
    rank, result = _rank(data), None
    for left in range(rows, 0, -1):
        if left > 1:
            column = part(data, (0, left), (0, 1))
            best = bb.emit(op.argmax(bb.emit(op.abs(column)), rank - 2, True))
            places = relax.const(np.arange(left).reshape(left, 1), "int64")
            is_best = bb.emit(op.equal(places, best))
            order = bb.emit(op.where(is_best, relax.const(0, "int64"), places))
            order = bb.emit(
                op.where(relax.const(np.arange(left).reshape(left, 1) == 0, "bool"), best, order)
            )
            order = bb.emit(op.broadcast_to(order, relax.ShapeExpr(_extents(data))))
            data = bb.emit(op.gather_elements(data, order, rank - 2))
            stays = bb.emit(
                op.squeeze(bb.emit(op.equal(best, relax.const(0, "int64"))), [rank - 2, rank - 1])
            )
            sign = bb.emit(op.where(stays, _like(1, data), _like(-1, data)))
        pivot = part(data, (0, 1), (0, 1))
        factor = bb.emit(op.squeeze(pivot, [rank - 2, rank - 1]))
        if left > 1:
            factor = bb.emit(op.multiply(factor, sign))
        result = factor if result is None else bb.emit(op.multiply(result, factor))
        if left > 1:
            is_zero = bb.emit(op.equal(pivot, _like(0, data)))
            pivot = bb.emit(op.where(is_zero, _like(1, data), pivot))
            row = bb.emit(op.divide(part(data, (0, 1), (1, left)), pivot))
            outer = bb.emit(op.multiply(part(data, (1, left), (0, 1)), row))
            data = bb.emit(op.subtract(part(data, (1, left), (1, left)), outer))
    return result


@_converts("Col2Im")
def _col2im(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """Add patches to an image: a transposed convolution with one kernel element per row."""
    data = inputs[0]
    image = [int(extent) for extent in _constant(inputs[1], "image_shape")]
    block = [int(extent) for extent in _constant(inputs[2], "block_shape")]
    count = len(block)
    if count not in (1, 2, 3):
        raise Refused(f"its blocks have {count} axes; supported are 1, 2 and 3")
    strides = list(attrs.get("strides", [1] * count))
    dilations = list(attrs.get("dilations", [1] * count))
    pads = list(attrs.get("pads", [0] * (2 * count)))
    reach = [(k - 1) * d + 1 for k, d in zip(block, dilations, strict=True)]
    room = [image[i] + pads[i] + pads[count + i] - reach[i] for i in range(count)]
    counts = [width // stride + 1 for width, stride in zip(room, strides, strict=True)]
    extra = [width % stride for width, stride in zip(room, strides, strict=True)]
    number, extents = math.prod(block), arithmetic(attrs)
    kernel = np.zeros((*block, 1, *reach))
    for place in np.ndindex(*block):
        kernel[(*place, 0, *(i * d for i, d in zip(place, dilations, strict=True)))] = 1
    kernel = relax.const(kernel.reshape(number, 1, *reach), _dtype(data))
    batch, rows, _ = _extents(data)
    channels = _known(rows, "the number of its rows") // number
    outer = extents.product([batch, channels])
    columns = bb.emit(op.reshape(data, relax.ShapeExpr([outer, number, *counts])))
    convolve = (op.nn.conv1d_transpose, op.nn.conv2d_transpose, op.nn.conv3d_transpose)[count - 1]
    pixels = bb.emit(convolve(columns, kernel, strides, pads, extra))
    return op.reshape(pixels, relax.ShapeExpr([batch, channels, *image]))


@_converts("DeformConv")
def _deform_conv(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """Sample the data at the shifted places of each kernel element, and multiply with the weight.

    A place outside of the data counts as 0, and one between elements is interpolated.
    """
    data, weight, offsets, bias, mask = (inputs[i] for i in range(5))
    if _rank(data) != 4:
        raise Refused(f"its operand has {_rank(data)} axes; pictures of 4 axes are supported")
    extents, (batch, channels, height, width) = arithmetic(attrs), _extents(data)
    channels = _known(channels, "the number of its channels")
    outs, _, rows, columns = _extents(weight)
    groups, shifts = attrs.get("group", 1), attrs.get("offset_group", 1)
    strides, dilations = attrs.get("strides", [1, 1]), attrs.get("dilations", [1, 1])
    pads, taps = attrs.get("pads", [0, 0, 0, 0]), rows * columns
    high, wide = _extents(offsets)[2:]
    dtype, images = _dtype(data), extents.product([batch, shifts])
    grid = bb.emit(op.reshape(offsets, [images, taps, 2, high, wide]))
    places, joined = [], extents.product([high, taps])
    for axis, extent, size, kernel in (
        (0, high, height, (rows, columns)),
        (1, wide, width, (rows, columns)),
    ):
        steps = bb.emit(op.arange(0, extent, 1, "int64"))
        steps = bb.emit(op.multiply(steps, relax.const(strides[axis], "int64")))
        tap = np.indices(kernel)[axis].reshape(-1) * dilations[axis] - pads[axis]
        base = bb.emit(
            op.add(bb.emit(op.expand_dims(steps, 0)), relax.const(tap[:, None], "int64"))
        )
        base = bb.emit(op.astype(base, dtype))
        base = bb.emit(op.expand_dims(base, [0, 3] if axis == 0 else [0, 2]))
        shift = bb.emit(
            op.squeeze(bb.emit(op.strided_slice(grid, [2], [axis], [axis + 1], [1])), [2])
        )
        place = bb.emit(op.add(shift, base))
        # The edges of the data are -1 and 1, half an element outside of the first and the last
        # place.
        double = bb.emit(op.add(bb.emit(op.multiply(place, _like(2, data))), _like(1, data)))
        whole = tensor_of(bb, Known(objects([size], ()), "int64"))
        whole = bb.emit(op.astype(whole, dtype))
        place = bb.emit(op.subtract(bb.emit(op.divide(double, whole)), _like(1, data)))
        places.append(bb.emit(op.reshape(place, [images, joined, wide])))
    grid = bb.emit(op.stack(places[::-1], 1))
    data = bb.emit(op.reshape(data, [images, channels // shifts, height, width]))
    samples = bb.emit(op.image.grid_sample(data, grid, "bilinear", "NCHW", "zeros", False))
    shape = [batch, shifts, channels // shifts, taps, high, wide]
    samples = bb.emit(op.reshape(samples, shape))
    if mask is not None:
        samples = bb.emit(
            op.multiply(samples, bb.emit(op.reshape(mask, [batch, shifts, 1, taps, high, wide])))
        )
    samples = bb.emit(op.reshape(samples, [batch, channels * taps, high, wide]))
    weight = bb.emit(op.reshape(weight, [outs, channels // groups * taps, 1, 1]))
    result = bb.emit(op.nn.conv2d(samples, weight, groups=groups))
    return result if bias is None else op.add(result, bb.emit(op.reshape(bias, [1, outs, 1, 1])))
