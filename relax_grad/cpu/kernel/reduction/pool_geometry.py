"""The geometry of pooling: the windows along each axis, and the places of their elements."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from tvm import tirx

from ..language.builder import Extent, bind, const

#: The most taps of a window, and the largest stride, for which the code of all taps and phases is
#: unrolled.
_MOST_TAPS, _LARGEST_STRIDE = 49, 4

#: The most elements of a plane: a task keeps several copies of it.
_LARGEST_PLANE = 2**21

#: The most channels of a tensor with one spatial axis that become the rows of a plane.
_MOST_ROWS = 16


@dataclass(frozen=True)
class Windows:
    """The windows along an axis: tap ``t`` of window ``o`` is at
    ``o * stride + t * dilation - before``.

    Attributes
    ----------
    extent, size, stride, before, number : int
        The elements of the axis, the taps of a window, the distance of windows, the padding before
        the data, and the number of windows.
    after : int
        The padding after the data, which matters if an average includes the padding.
    dilation : int
        The distance of taps.
    """

    extent: int
    size: int
    stride: int
    before: int
    number: int
    after: int = 0
    dilation: int = 1

    @property
    def length(self) -> int:
        """The number of elements from the first tap of the first window to the last tap of the last
        window."""
        return (self.number - 1) * self.stride + self.reach + 1

    @property
    def reach(self) -> int:
        """The distance of the last tap of a window from its first."""
        return (self.size - 1) * self.dilation

    @property
    def copied(self) -> int:
        """The number of elements of the axis before the end of the last window."""
        return max(0, min(self.extent, self.length - self.before))

    def has_elements(self) -> bool:
        """Tell whether every window has an element that is not padding."""
        starts = [o * self.stride - self.before for o in range(self.number)]
        taps = range(0, self.reach + 1, self.dilation)
        return all(any(0 <= start + tap < self.extent for tap in taps) for start in starts)

    def first_tap(self, window: tirx.PrimExpr, splat: Callable = const) -> tirx.PrimExpr:
        """Return the first tap of a window that is not in the padding before the data."""
        missing = tirx.max(splat(0), splat(self.before) - window * splat(self.stride))
        if self.dilation == 1:
            return missing
        return tirx.truncdiv(missing + splat(self.dilation - 1), splat(self.dilation))

    def taps(self, phase: int) -> list[tuple[int, int]]:
        """Return the taps that read elements ``i * stride + phase``, each with its window relative
        to i."""
        at = phase + self.before
        distances = ((t, at - t * self.dilation) for t in range(self.size))
        return [(t, far // self.stride) for t, far in distances if far % self.stride == 0]

    def margins(self, steps: int) -> tuple[int, int]:
        """Return the numbers of absent windows before the first and after the last that ``steps``
        strides refer to."""
        offsets = self._offsets()
        return -min(offsets), max(0, steps - 1 + max(offsets) - (self.number - 1))

    @property
    def ahead(self) -> int:
        """The distance of the last window that has an element of a stride from the window with the
        number of the stride."""
        return max(self._offsets())

    def _offsets(self) -> list[int]:
        return [0, *(o for phase in range(self.stride) for _, o in self.taps(phase))]


@dataclass(frozen=True)
class Pool:
    """A pooling of planes, or of volumes.

    Attributes
    ----------
    planes : int or tirx.PrimExpr
        The number of planes.
    outer : tuple[Windows, ...]
        The windows along all axes except the last: one axis of a plane, two axes of a volume.
    columns : Windows
        The windows along the last axis.
    """

    planes: Extent
    outer: tuple[Windows, ...]
    columns: Windows

    @property
    def extents(self) -> list[int]:
        return [axis.extent for axis in (*self.outer, self.columns)]

    @property
    def numbers(self) -> list[int]:
        return [axis.number for axis in (*self.outer, self.columns)]

    @property
    def is_dilated(self) -> bool:
        return any(axis.dilation > 1 for axis in (*self.outer, self.columns))

    def outer_taps(self) -> Iterator[tuple[int, ...]]:
        """Yield the taps of a window along all axes except the last."""
        return product(*(range(axis.size) for axis in self.outer))

    def tap(self, outer: Sequence[int], column: int) -> int:
        """Return the index of a tap, in row-major order."""
        return flat([*outer, column], [axis.size for axis in (*self.outer, self.columns)])

    def row(self, plane: tirx.PrimExpr, at: Sequence) -> tirx.PrimExpr:
        """Return the index of the first element of a row."""
        return bind(flat([plane, *at, const(0)], [0, *self.extents]))

    def windows(self, plane: tirx.PrimExpr, at: Sequence) -> tirx.PrimExpr:
        """Return the index of the first window of a row."""
        return bind(flat([plane, *at, const(0)], [0, *self.numbers]))


def pool_of(batch: Extent, channels: int, axes: Sequence[Windows]) -> Pool | None:
    """Return the pooling of images of channels; None if no kernel computes it."""
    *outer, columns = axes
    if prod(axis.size for axis in axes) > _MOST_TAPS:
        return None
    if max(axis.stride for axis in axes) > _LARGEST_STRIDE:
        return None
    if prod(axis.extent for axis in axes) > _LARGEST_PLANE:
        return None
    if not all(axis.has_elements() for axis in axes):
        return None
    if not outer:
        rows = max(i for i in range(1, _MOST_ROWS + 1) if channels % i == 0)
        outer, channels = [Windows(rows, 1, 1, 0, rows)], channels // rows
    return Pool(batch * channels, tuple(outer), columns)


def flat(at: Sequence, extents: Sequence[int]) -> Extent:
    """Return the index of an element, in row-major order."""
    index = at[0]
    for i, extent in zip(at[1:], extents[1:], strict=True):
        index = index * extent + i
    return index
