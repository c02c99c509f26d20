"""The common geometry of convolutions and their data gradients: the source elements that a target
element reads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import gcd, prod

from tvm import tirx

from ..language.builder import Extent, bind, ceil_div, const
from .geometry import ONE, Conv2d, Windows


@dataclass(frozen=True)
class Taps:
    """The taps of one phase: tap ``first + j * step`` reads at ``offset + j * move``, for j below
    ``number``.

    Steps and moves are positive: in a data gradient the kernel is reversed, so that its last tap is
    number 0.
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
    """A spatial axis: the taps of the target elements, and the source elements that they read.

    Element ``i * len(phases) + phase`` of the target reads element ``i * step + offset`` of the
    source for each offset of the phase's taps. Out-of-bounds elements are 0.

    Attributes
    ----------
    target, source : int
        The extents.
    step : int
        The distance of the source elements of consecutive target elements of a phase.
    phases : tuple[Taps, ...]
        The taps of each phase.
    apart : int
        The stride of the source elements in memory; the elements between them are not read.
    stored : int
        The number of all elements in memory.
    """

    target: int
    source: int
    step: int
    phases: tuple[Taps, ...]
    apart: int
    stored: int

    @staticmethod
    def forward(of: Windows) -> Axis:
        """Return the axis of a convolution: window i reads
        ``i * stride + tap * dilation - before``."""
        if of.kernel == 1 and of.is_inside:
            return Axis(
                of.number,
                of.number,
                1,
                phases=(Taps(1, 0, 1, 0, 1),),
                apart=of.stride,
                stored=of.size,
            )
        taps = Taps(of.kernel, 0, 1, -of.before, of.dilation)
        return Axis(of.number, of.size, of.stride, phases=(taps,), apart=1, stored=of.size)

    @staticmethod
    def backward(of: Windows) -> Axis:
        """Return the axis of a data gradient: element i reads
        ``(i + before - tap * dilation) / stride``."""
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
        return Axis(of.size, of.number, 1, phases=tuple(phases), apart=1, stored=of.number)

    @cached_property
    def offsets(self) -> tuple[int, int]:
        """Return the first and the last offset of all taps."""
        offsets = [offset for taps in self.phases for offset in taps.offsets]
        return min(offsets), max(offsets)

    def count(self, phase: int = 0) -> int:
        """Return the number of target elements of a phase."""
        return max(0, ceil_div(self.target - phase, len(self.phases)))

    def extent(self, count: int) -> int:
        """Return the number of source elements that ``count`` elements of a phase span."""
        return (count - 1) * self.step + self.offsets[1] - self.offsets[0] + 1

    def taps(self, phase: Extent) -> Taps:
        """Return the taps of a phase that is an expression, known at run time."""
        first, *others = self.phases
        if not others:
            return first
        number, start, offset = (
            bind(_table([getattr(taps, name) for taps in self.phases], phase))
            for name in ("number", "first", "offset")
        )
        return Taps(number, start, first.step, offset, first.move)

    @property
    def is_inside(self) -> bool:
        """Whether all reads are in bounds."""
        return self.offsets[0] >= 0 and self.offsets[0] + self.extent(self.count()) <= self.source


@dataclass(frozen=True)
class Gathering:
    """A computation, per group: ``target[v] = sum over source channel r and tap of source[r]
    weight[v, r]``.

    The weight is stored as ``[v, r, tap]``, or if ``source_major`` as ``[r, v, tap]`` with the last
    tap first.

    Attributes
    ----------
    batch : int or tirx.PrimExpr
        The number of images, or of volumes.
    groups, sources, targets : int
        The number of groups, and the number of source and of target channels in a group.
    slices : Axis
        The axis of the images in a volume. For a plain image, it is a single point with a single
        tap.
    axes : list[Axis]
        The axes of an image.
    kernel : tuple[int, int, int]
        The extents of the weight along the three axes.
    source_major : bool
        The layout of the weight, as above.
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
        """Return the number of images of the target, counted separately for each group of
        channels."""
        return self.batch * (self.groups * self.slices.target)

    @property
    def is_flat(self) -> bool:
        """Whether images are plain, not slices of volumes."""
        return self.slices == Axis.forward(ONE)

    @property
    def plane(self) -> int:
        """Return the elements of an image of the source in memory."""
        return self.rows.stored * self.columns.stored

    @property
    def taps(self) -> int:
        """Return the number of taps of a slice of the weight."""
        return prod(self.kernel[1:])

    @staticmethod
    def forward(conv: Conv2d, depth: Windows = ONE) -> Gathering:
        """Return the computation of a convolution's result from its data; with a depth, of
        volumes."""
        sources, targets = conv.in_channels // conv.groups, conv.out_channels // conv.groups
        slices, *axes = (Axis.forward(windows) for windows in (depth, conv.height, conv.width))
        kernel = (depth.kernel, *conv.kernel)
        return Gathering(
            conv.batch,
            conv.groups,
            sources,
            targets=targets,
            slices=slices,
            axes=axes,
            kernel=kernel,
            source_major=False,
        )

    @staticmethod
    def backward(conv: Conv2d, depth: Windows = ONE) -> Gathering:
        """Return the computation of a convolution's data gradient from the gradient of its
        result."""
        sources, targets = conv.out_channels // conv.groups, conv.in_channels // conv.groups
        slices, *axes = (Axis.backward(windows) for windows in (depth, conv.height, conv.width))
        kernel = (depth.kernel, *conv.kernel)
        return Gathering(
            conv.batch,
            conv.groups,
            sources,
            targets=targets,
            slices=slices,
            axes=axes,
            kernel=kernel,
            source_major=True,
        )


def _table(values: list[int], index: tirx.PrimExpr) -> tirx.PrimExpr:
    """Return ``values[index]`` for a run-time index, as a chain of selections."""
    result = const(values[-1])
    for i in reversed(range(len(values) - 1)):
        if values[i:] != values[i : i + 1] * (len(values) - i):
            result = tirx.Select(tirx.EQ(index, const(i)), const(values[i]), result)
    return result
