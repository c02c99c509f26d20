"""The slices of volumes for Winograd's minimal filtering."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx

from ..language import builder as b
from ..language.builder import Extent, bind, ceil_div, const
from ..language.statements import Emit
from .gathering import Axis
from .geometry import ONE


@dataclass(frozen=True)
class Slices:
    """The images of a volume, and the taps of the weight along its depth.

    Attributes
    ----------
    axis : Axis
        The slices of the target and of the source.
    taps : int
        The number of all taps.
    is_flipped : bool
        Whether the weight is flipped, and its input and output channels are swapped.
    """

    axis: Axis
    taps: int
    is_flipped: bool = False

    @property
    def is_flat(self) -> bool:
        """Whether volumes are plain images."""
        return self.axis == Axis.forward(ONE)

    def sizes(self) -> list[int]:
        """Return the numbers of slices of the target that a block may have."""
        phases, axis = len(self.axis.phases), self.axis
        counts = ceil_div(axis.target, phases)
        parts = {ceil_div(counts, number) for number in range(1, counts + 1)}
        return [min(axis.target, phases * part) for part in sorted(parts, reverse=True)]

    def read(self, size: int) -> int:
        """Return the number of slices of the source that a block reads."""
        if size == self.axis.target:
            return self.axis.source
        return min(self.axis.source, self.axis.extent(ceil_div(size, len(self.axis.phases))))

    def block(self, index: tirx.PrimExpr, size: int) -> tuple:
        """Return, of a block of the target, the first slice, the number of slices, the first slice
        of the source that is read, and the number of these."""
        axis = self.axis
        if size == axis.target:
            return const(0), const(size), const(0), const(axis.source)
        first, phases = bind(index * size), len(axis.phases)
        number = bind(tirx.min(const(size), axis.target - first))
        read = bind(first // phases * axis.step + axis.offsets[0])
        stop = bind(tirx.min(read + axis.extent(ceil_div(size, phases)), const(axis.source)))
        start = bind(tirx.max(read, const(0)))
        return first, number, start, bind(tirx.max(const(0), stop - start))

    def each_tap(self, index: tirx.PrimExpr, first: tirx.PrimExpr, emit: Emit) -> None:
        """Emit ``emit(slice, tap)`` for each tap of slice ``index`` of the target that reads a
        slice of the source in bounds; slices are counted from ``first`` on."""
        axis = self.axis
        taps = axis.taps(bind(index % len(axis.phases)))
        start = bind(index // len(axis.phases) * axis.step + taps.offset)
        with b.serial(0, taps.number) as j:
            at = bind(start + j * taps.move)
            tap = bind(taps.first + j * taps.step)
            if axis.is_inside:
                emit(at - first, tap)
            else:
                with b.when(tirx.all(at >= 0, at < axis.source)):
                    emit(at - first, tap)


@dataclass(frozen=True)
class Part:
    """A part of the work: images, a block of their slices, and rows of squares of each.

    Attributes
    ----------
    first, images : tirx.PrimExpr
        The first image, and the number of images.
    slice, slices : tirx.PrimExpr
        The first slice of the target, and the number of these.
    start, read : tirx.PrimExpr
        The first slice of the source, and the number of these.
    """

    first: Extent
    images: Extent
    slice: Extent
    slices: Extent
    start: Extent
    read: Extent
