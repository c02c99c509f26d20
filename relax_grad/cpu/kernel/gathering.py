"""The geometry of convolutions and of their data gradients, which is one: what each target element reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd, prod

from tvm import tirx

from .builder import Extent, bind, ceil_div, const
from .convolution import ONE, Conv2d, Windows


@dataclass(frozen=True)
class Taps:
    """The taps of one phase: tap ``first + j * step`` reads at ``offset + j * move``, for j below ``number``.

    Steps and moves are positive: the kernel of a data gradient is taken backwards, its last tap is number 0.
    """

    number: int
    first: int
    step: int
    offset: int
    move: int

    @property
    def offsets(self) -> list[int]:
        return [self.offset + j * self.move for j in range(self.number)]


@dataclass(frozen=True)
class Axis:
    """A spatial axis: what taps the elements of the target have, and what they read.

    Element ``i * len(phases) + phase`` of the target reads element ``i * step + offset`` of the source for each
    offset of the phase's taps; there are zeros outside of the source.

    Attributes
    ----------
    target, source : int
        The extents.
    step : int
        What the source moves by from one target element of a phase to the next.
    phases : tuple[Taps, ...]
        The taps of each phase.
    apart : int
        How far apart the elements of the source are in memory; those between them are read by none.
    stored : int
        How many elements memory has, all counted.
    """

    target: int
    source: int
    step: int
    phases: tuple[Taps, ...]
    apart: int
    stored: int

    @staticmethod
    def forward(of: Windows) -> Axis:
        """Return the axis of a convolution: window i reads ``i * stride + tap * dilation - before``."""
        if of.kernel == 1 and of.is_inside:
            return Axis(of.number, of.number, 1, (Taps(1, 0, 1, 0, 1),), of.stride, of.size)
        taps = Taps(of.kernel, 0, 1, -of.before, of.dilation)
        return Axis(of.number, of.size, of.stride, (taps,), 1, of.size)

    @staticmethod
    def backward(of: Windows) -> Axis:
        """Return the axis of a data gradient: element i reads ``(i + before - tap * dilation) / stride``."""
        kernel, stride, dilation = of.kernel, of.stride, of.dilation
        step = gcd(stride, dilation)
        phases = []
        for phase in range(stride):
            at = phase + of.before
            taps = [tap for tap in range(kernel) if (at - tap * dilation) % stride == 0]
            last = taps[-1] if taps else 0
            offset = (at - last * dilation) // stride
            flipped = kernel - 1 - last
            phases.append(Taps(len(taps), flipped, stride // step, offset, dilation // step))
        return Axis(of.size, of.number, 1, tuple(phases), 1, of.number)

    @cached_property
    def offsets(self) -> tuple[int, int]:
        """Return the first and the last offset of all taps."""
        offsets = [offset for taps in self.phases for offset in taps.offsets]
        return min(offsets), max(offsets)

    def count(self, phase: int = 0) -> int:
        """Return how many elements of the target a phase has."""
        return max(0, ceil_div(self.target - phase, len(self.phases)))

    def extent(self, count: int) -> int:
        """Return how many elements of the source this many elements of a phase reach over."""
        return (count - 1) * self.step + self.offsets[1] - self.offsets[0] + 1

    def taps(self, phase) -> Taps:
        """Return the taps of a phase that is known at run time."""
        first, *others = self.phases
        if not others:
            return first
        number, start, offset = (
            bind(_table([getattr(each, name) for each in self.phases], phase))
            for name in ("number", "first", "offset")
        )
        return Taps(number, start, first.step, offset, first.move)

    @property
    def is_inside(self) -> bool:
        """Whether nothing outside of the source is read."""
        return self.offsets[0] >= 0 and self.offsets[0] + self.extent(self.count()) <= self.source


@dataclass(frozen=True)
class Gathering:
    """What is computed, per group: ``target[v] = sum over source channel r and tap of source[r] weight[v, r]``.

    The weight is ``[v, r, tap]``, or where ``source_major`` ``[r, v, tap]`` with the last tap first.

    Attributes
    ----------
    batch : int or tirx.PrimExpr
        The number of images, or of volumes.
    groups, sources, targets : int
        The groups of channels, and the channels of a group.
    slices : Axis
        The axis along which a volume has images. An image that is one alone has no other taps.
    axes : list[Axis]
        The axes of an image.
    kernel : tuple[int, int, int]
        The extents of the weight along the three axes.
    source_major : bool
        Which way the weight lies.
    """

    batch: Extent
    groups: int
    sources: int
    targets: int
    slices: Axis
    axes: list[Axis]
    kernel: tuple[int, int, int]
    source_major: bool

    @property
    def rows(self) -> Axis:
        return self.axes[0]

    @property
    def columns(self) -> Axis:
        return self.axes[1]

    @property
    def images(self) -> Extent:
        """Return the number of images of the target, those of each group of channels counted alone."""
        return self.batch * (self.groups * self.slices.target)

    @property
    def is_flat(self) -> bool:
        """Whether an image is one alone."""
        return self.slices == Axis.forward(ONE)

    @property
    def taps(self) -> int:
        """Return the number of taps of a slice of the weight."""
        return prod(self.kernel[1:])

    @staticmethod
    def forward(conv: Conv2d, depth: Windows = ONE) -> Gathering:
        """Return what gathers the result of a convolution, of slices if there is a depth, from its data."""
        sources, targets = conv.in_channels // conv.groups, conv.out_channels // conv.groups
        slices, *axes = (Axis.forward(each) for each in (depth, conv.height, conv.width))
        kernel = (depth.kernel, *conv.kernel)
        return Gathering(conv.batch, conv.groups, sources, targets, slices, axes, kernel, False)

    @staticmethod
    def backward(conv: Conv2d, depth: Windows = ONE) -> Gathering:
        """Return what gathers the gradient of a convolution's data from that of its result."""
        sources, targets = conv.out_channels // conv.groups, conv.in_channels // conv.groups
        slices, *axes = (Axis.backward(each) for each in (depth, conv.height, conv.width))
        kernel = (depth.kernel, *conv.kernel)
        return Gathering(conv.batch, conv.groups, sources, targets, slices, axes, kernel, True)


def _table(values: Sequence[int], index):
    """Return the value at an index, as a chain of selections."""
    result = const(values[-1])
    for i in reversed(range(len(values) - 1)):
        if values[i:] != values[i : i + 1] * (len(values) - i):
            result = tirx.Select(tirx.EQ(index, const(i)), const(values[i]), result)
    return result
