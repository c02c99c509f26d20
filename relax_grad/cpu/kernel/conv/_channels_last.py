"""Copies of images with the channels innermost."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx

from ..language import builder as b
from ..language.builder import Vectors, bind, const
from ..language.epilogue import biases_from
from ..language.extents import Extent
from ..language.halves import Tensor
from ..language.turned import turn
from ._chunks import whole_or_rest
from .geometry import Windows


@dataclass(frozen=True)
class Block:
    """A block of channels of an image, one for each lane of a vector.

    Attributes
    ----------
    buffer : tirx.Buffer
        The images, NCHW.
    plane : tirx.PrimExpr
        The index of the buffer's plane that holds channel 0.
    channel : tirx.PrimExpr
        The first channel of the block.
    channels : int
        The number of channels of the image; lanes beyond them are copied as zeros.
    distance : int
        The stride of the channels, in planes.
    """

    buffer: tirx.Buffer
    plane: tirx.PrimExpr
    channel: tirx.PrimExpr
    channels: int
    distance: int = 1


def pack_channels(
    vectors: Vectors,
    width: Windows,
    height: Windows,
    block: Block,
    rows: tuple[tirx.PrimExpr, Extent],
    target: tuple[tirx.Buffer, tirx.PrimExpr, int],
    offset: tirx.PrimExpr = None,
) -> None:
    """Copy rows of a block of channels to ``[row][column][channel]``.

    The rows and columns are those that a convolution reads, ``step`` apart; the padding is copied
    as zeros.

    Parameters
    ----------
    vectors : Vectors
        The vectors.
    width, height : Windows
        The axes of the images.
    block : Block
        The channels to copy.
    rows : tuple
        The first row, in steps, and the number of rows.
    target : tuple
        A buffer, the offset of the copy in it, and the stride of the columns.
    offset : tirx.PrimExpr, optional
        An element of the height that takes the place of the first one, below ``step``.
    """
    first, number = rows
    buffer, start, pixel = target
    columns = width.span(width.number)
    size = height.size * width.size
    base = bind((block.plane + block.channel * block.distance) * size)
    left, right = width.inside
    with b.serial(0, number) as i:
        row = bind((first + i) * height.step - height.before + (0 if offset is None else offset))
        to = bind(start + i * (columns * pixel))

        def clear(begin: int, end: int, to: tirx.PrimExpr = to) -> None:
            if end > begin:
                with b.serial(begin, end) as j:
                    vectors.store(buffer, to + j * pixel, vectors.splat(0))

        def copy(row: tirx.PrimExpr = row, to: tirx.PrimExpr = to) -> None:
            clear(0, left)
            clear(right, columns)
            source = bind(base + row * width.size + (left * width.step - width.before))
            whole_or_rest(
                block.channel // vectors.lanes,
                block.channels,
                vectors.lanes,
                lambda channels: _row(
                    vectors,
                    width,
                    size * block.distance,
                    source=block.buffer,
                    start=source,
                    channels=channels,
                    target=(buffer, to, pixel),
                ),
            )

        reach = 0 if offset is None else height.step - 1
        outside = height.before > 0 or reach + (height.span(height.number) - 1) * height.step >= (
            height.size + height.before
        )
        if outside:
            b.either(tirx.all(row >= 0, row < height.size), copy, lambda: clear(0, columns))
        else:
            copy()


def _row(
    vectors: Vectors,
    width: Windows,
    plane: int,
    source: Tensor,
    start: tirx.PrimExpr,
    channels: int,
    target: tuple[tirx.Buffer, tirx.PrimExpr, int],
) -> None:
    """Copy the in-bounds columns of one row, a square at a time, transposed in registers."""
    buffer, to, pixel = target
    left, right = width.inside
    step, lanes = width.step, vectors.lanes
    # For short rows, the call would take longer than the shuffles of the columns that exist.
    if right - left >= lanes and vectors.has_function(source, buffer):
        turn(
            lanes,
            (source, start, plane),
            (channels - 1, channels),
            (right - left - 1) * step + 1,
            (buffer, to + left * pixel, pixel),
            every=step,
        )
        return
    at_once = -(-lanes // step)

    def square(j: tirx.PrimExpr, number: int) -> None:
        """Copy ``number`` columns, from the j-th in-bounds column on."""
        span = min(lanes, (number - 1) * step + 1)
        rows = [
            bind(vectors.load(source, start + j * step + c * plane, span))
            if c < channels
            else bind(vectors.splat(0))
            for c in range(lanes)
        ]
        columns = vectors.transpose(rows)
        for i in range(number):
            vectors.store(buffer, to + (left + j + i) * pixel, columns[i * step])

    full = (right - left) // at_once
    if full:
        with b.serial(0, full) as i:
            square(bind(i * at_once), at_once)
    if (right - left) % at_once:
        square(const(full * at_once), (right - left) % at_once)


def pad_rows(
    vectors: Vectors,
    height: Windows,
    width: Windows,
    source: tuple[tirx.Buffer, tirx.PrimExpr],
    rows: tuple[tirx.PrimExpr, tirx.PrimExpr],
    target: tuple[tirx.Buffer, tirx.PrimExpr, int],
) -> None:
    """Copy rows of a plane with their zero padding.

    Parameters
    ----------
    vectors : Vectors
        The vectors.
    height, width : Windows
        The axes of the plane.
    source : tuple
        A buffer, and the offset of the plane in it.
    rows : tuple
        The first row, counted from the first row of padding, and the number of rows.
    target : tuple
        A buffer, the offset of the copy in it, and the stride of the rows. Rows are written up to
        their full stride.
    """
    buffer, to, pitch = target
    number = max(0, min(width.size, pitch - width.before))
    plain, start = source
    with b.serial(0, rows[1]) as i:
        row = bind(rows[0] + i - height.before)
        here = bind(to + i * pitch)

        def clear(begin: int, end: int, here: tirx.PrimExpr = here) -> None:
            zero = vectors.splat(0)
            vectors.each(
                end - begin, lambda j, left: vectors.store(buffer, here + begin + j, zero, left)
            )

        def copy(row: tirx.PrimExpr = row, here: tirx.PrimExpr = here) -> None:
            clear(0, min(width.before, pitch))
            source = bind(start + row * width.size)
            there = bind(here + width.before)
            vectors.each(
                number,
                lambda j, left: vectors.store(
                    buffer, there + j, vectors.load(plain, source + j, left), left
                ),
            )
            clear(min(width.before + number, pitch), pitch)

        inside = tirx.all(row >= 0, row < height.size)
        b.either(inside, copy, lambda: clear(0, pitch))


def unpack_row(
    vectors: Vectors,
    line: tuple[tirx.Buffer, tirx.PrimExpr],
    target: tuple[tirx.Buffer, tirx.PrimExpr, int],
    columns: int,
    channels: int,
) -> None:
    """Copy a row, ``[column][channel]``, to the planes of its channels.

    Parameters
    ----------
    vectors : Vectors
        The vectors.
    line : tuple
        A buffer, and the offset of the row in it.
    target : tuple
        A buffer, the offset in it of the first channel's row, and the stride of the channels.
    columns, channels : int
        The number of columns and of channels; at most as many channels as lanes. The row has memory
        for a multiple of ``lanes`` columns.
    """
    (row, begin), (buffer, start, plane) = line, target
    lanes, bias = vectors.lanes, biases_from(buffer, start)
    if columns >= lanes and vectors.has_function(row, buffer):
        vectors.turn_rows((row, begin, lanes), columns, channels, target)
        return

    def square(column: tirx.PrimExpr, number: int) -> None:
        # Columns that do not exist repeat the last one.
        last = (number or lanes) - 1
        of_columns = [begin + (column + min(i, last)) * lanes for i in range(lanes)]
        loaded = [bind(vectors.load(row, at)) for at in of_columns]
        for c, vector in enumerate(vectors.transpose(loaded)[:channels]):
            vectors.store(buffer, start + column + c * plane, vector, number, bias(c))

    vectors.each(columns, square)


def taps_of_channels(
    vectors: Vectors, source: tuple[tirx.Buffer, tirx.PrimExpr, int], taps: int, channels: int
) -> list:
    """Load the weights of some channels, ``[channel][tap]``, as vectors of channels, one for each
    tap.

    Parameters
    ----------
    vectors : Vectors
        The vectors.
    source : tuple
        A buffer, the offset of the weights in it, and the stride of the channels.
    taps, channels : int
        The number of taps and of channels; at most as many channels as lanes.
    """
    buffer, start, step = source
    lanes = vectors.lanes
    columns = []
    for first in range(0, taps, lanes):
        number = min(lanes, taps - first)
        rows = [
            bind(vectors.load(buffer, start + (c * step + first), number))
            if c < channels
            else bind(vectors.splat(0))
            for c in range(lanes)
        ]
        columns += vectors.transpose(rows)[:number]
    return columns


def channels_of_taps(
    vectors: Vectors,
    source: tuple[tirx.Buffer, tirx.PrimExpr],
    taps: int,
    channels: int,
    target: tuple[tirx.Buffer, tirx.PrimExpr],
) -> None:
    """Copy vectors of channels, one for each tap, to the taps of each channel, ``[channel][tap]``.

    Parameters
    ----------
    vectors : Vectors
        The vectors.
    source, target : tuple
        A buffer, and the offset of the first element in it.
    taps, channels : int
        The number of taps and of channels; at most as many channels as lanes. The vectors have
        memory for a multiple of ``lanes`` taps.
    """
    (plain, begin), (buffer, start) = source, target
    lanes = vectors.lanes
    if vectors.has_function(plain, buffer):
        vectors.turn_rows((plain, begin, lanes), taps, channels, (buffer, start, taps))
        return
    for first in range(0, taps, lanes):
        number = min(lanes, taps - first)
        rows = [
            bind(vectors.load(plain, begin + (first + i) * lanes))
            if i < number
            else bind(vectors.splat(0))
            for i in range(lanes)
        ]
        for c, vector in enumerate(vectors.transpose(rows)[:channels]):
            vectors.store(buffer, start + c * taps + first, vector, number)
