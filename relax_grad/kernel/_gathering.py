"""The geometry of convolutions and of their data gradients, which is one: what each target element reads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import gcd, prod

from ._builder import Extent, ceil_div
from ._convolution import Conv2d


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
    """

    target: int
    source: int
    step: int
    phases: tuple[Taps, ...]

    @staticmethod
    def forward(windows, size, kernel, stride, before, dilation) -> Axis:
        """Return the axis of a convolution: window i reads ``i * stride + tap * dilation - before``."""
        return Axis(windows, size, stride, (Taps(kernel, 0, 1, -before, dilation),))

    @staticmethod
    def backward(size, windows, kernel, stride, before, dilation) -> Axis:
        """Return the axis of a data gradient: element i reads ``(i + before - tap * dilation) / stride``."""
        step = gcd(stride, dilation)
        phases = []
        for phase in range(stride):
            at = phase + before
            taps = [tap for tap in range(kernel) if (at - tap * dilation) % stride == 0]
            last = taps[-1] if taps else 0
            offset = (at - last * dilation) // stride
            flipped = kernel - 1 - last
            phases.append(Taps(len(taps), flipped, stride // step, offset, dilation // step))
        return Axis(size, windows, 1, tuple(phases))

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

    @property
    def is_inside(self) -> bool:
        """Whether nothing outside of the source is read."""
        return self.offsets[0] >= 0 and self.offsets[0] + self.extent(self.count()) <= self.source


@dataclass(frozen=True)
class Gathering:
    """What is computed, per group: ``target[v] = sum over source channel r and tap of source[r] weight[v, r]``.

    The weight is ``[v, r, tap]``, or where ``source_major`` ``[r, v, tap]`` with the last tap first.
    """

    batch: Extent
    groups: int
    sources: int
    targets: int
    axes: list[Axis]
    kernel: tuple[int, int]
    source_major: bool

    @property
    def rows(self) -> Axis:
        return self.axes[0]

    @property
    def columns(self) -> Axis:
        return self.axes[1]

    @property
    def images(self) -> Extent:
        """Return the number of images, those of each group of channels counted alone."""
        return self.batch * self.groups

    @property
    def taps(self) -> int:
        return prod(self.kernel)

    @staticmethod
    def forward(conv: Conv2d) -> Gathering:
        """Return what gathers the result of a convolution from its data."""
        sources, targets = conv.in_channels // conv.groups, conv.out_channels // conv.groups
        axes = [Axis.forward(conv.out_size[i], conv.size[i], *conv.along(i)) for i in (0, 1)]
        return Gathering(conv.batch, conv.groups, sources, targets, axes, conv.kernel, False)

    @staticmethod
    def backward(conv: Conv2d) -> Gathering:
        """Return what gathers the gradient of a convolution's data from that of its result."""
        sources, targets = conv.out_channels // conv.groups, conv.in_channels // conv.groups
        axes = [Axis.backward(conv.size[i], conv.out_size[i], *conv.along(i)) for i in (0, 1)]
        return Gathering(conv.batch, conv.groups, sources, targets, axes, conv.kernel, True)
