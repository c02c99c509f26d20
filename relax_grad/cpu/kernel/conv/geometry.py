"""The geometry of convolutions that kernels are generated for."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from math import gcd, prod

from ..language.builder import Extent, ceil_div


@dataclass(frozen=True)
class Conv2d:
    """A convolution of images, NCHW, with a weight, OIHW. The batch may be symbolic (int32).

    Attributes
    ----------
    batch : int or tirx.PrimExpr
        The number of images.
    in_channels, out_channels : int
        The channels of data and result.
    size, kernel, strides, dilation : tuple[int, int]
        Extents of data and weight, and distances between windows and between taps: for rows, then
        for columns.
    padding : tuple[int, int, int, int]
        Zeros before the rows and the columns, then those after.
    groups : int
        The number of groups of channels.
    """

    batch: Extent
    in_channels: int
    out_channels: int
    size: tuple[int, int]
    kernel: tuple[int, int]
    strides: tuple[int, int] = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1

    @property
    def height(self) -> Windows:
        return self._windows(0)

    @property
    def width(self) -> Windows:
        return self._windows(1)

    @property
    def out_size(self) -> tuple[int, int]:
        """The number of rows and of columns of the result."""
        return self.height.number, self.width.number

    @property
    def is_depthwise(self) -> bool:
        """Whether every channel has its own kernel."""
        return 1 < self.groups == self.in_channels == self.out_channels

    @property
    def data_shape(self) -> tuple[Extent, ...]:
        return (self.batch, self.in_channels, *self.size)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return (self.out_channels, self.in_channels // self.groups, *self.kernel)

    @property
    def out_shape(self) -> tuple[Extent, ...]:
        return (self.batch, self.out_channels, *self.out_size)

    @property
    def flattened(self) -> Conv2d:
        """The same convolution with its rows joined into one, if every window is a single
        element."""
        if not (self.height.is_pointwise and self.width.is_pointwise):
            return self
        return replace(self, size=(1, prod(self.size)))

    def with_rows_of(self, columns: int) -> Conv2d:
        """Return an equivalent convolution over the same memory, with rows joined if every window
        is a single element.

        The joined rows are as long as possible, but at most ``columns`` columns (or one original
        row).
        """
        if not (self.height.is_pointwise and self.width.is_pointwise):
            return self
        rows, width = self.size
        most = max(1, columns // width)
        joined = next(number for number in range(most, 0, -1) if rows % number == 0)
        return replace(self, size=(rows // joined, width * joined))

    def _windows(self, i: int) -> Windows:
        return Windows(
            self.size[i],
            self.kernel[i],
            self.strides[i],
            self.padding[i],
            self.padding[i + 2],
            self.dilation[i],
        )


@dataclass(frozen=True)
class Conv3d:
    """A convolution of volumes, NCDHW, with a weight, OIDHW: a volume is a stack of slices.

    Attributes
    ----------
    slices : Conv2d
        The convolution of a slice of the data with a slice of the weight.
    depth : Windows
        The axis along which the results of slices are added.
    """

    slices: Conv2d
    depth: Windows

    @property
    def data_shape(self) -> tuple[Extent, ...]:
        return self._shape(self.slices.data_shape, self.depth.size)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return self._shape(self.slices.weight_shape, self.depth.kernel)

    @property
    def out_shape(self) -> tuple[Extent, ...]:
        return self._shape(self.slices.out_shape, self.depth.number)

    @property
    def of_two_axes(self) -> Conv2d | None:
        """An equivalent convolution of images over the same memory, or None."""
        slices, depth = self.slices, self.depth
        if slices.height.is_pointwise and slices.width.is_pointwise:
            return replace(
                slices,
                size=(depth.size, prod(slices.size)),
                kernel=(depth.kernel, 1),
                strides=(depth.stride, 1),
                padding=(depth.before, 0, depth.after, 0),
                dilation=(depth.dilation, 1),
            )
        return slices if astuple(depth) == astuple(ONE) else None

    @staticmethod
    def _shape(shape: tuple, depth: int) -> tuple:
        return (*shape[:2], depth, *shape[2:])


@dataclass(frozen=True)
class Windows:
    """The windows of a convolution along one axis: window w and tap k read element w * stride + k *
    dilation - before.

    Attributes
    ----------
    size, kernel : int
        The extents of the data and of the weight.
    stride, dilation : int
        As above.
    before, after : int
        The zeros before and after the data.
    """

    size: int
    kernel: int
    stride: int
    before: int
    after: int
    dilation: int

    @property
    def number(self) -> int:
        """The number of windows."""
        reach = self.dilation * (self.kernel - 1) + 1
        return (self.size + self.before + self.after - reach) // self.stride + 1

    @property
    def is_pointwise(self) -> bool:
        """Whether window w reads element w and nothing else."""
        return (self.kernel, self.stride, self.before, self.after) == (1, 1, 0, 0)

    @property
    def is_inside(self) -> bool:
        """Whether all windows are in bounds."""
        reach = (self.number - 1) * self.stride + (self.kernel - 1) * self.dilation
        return self.before == 0 and reach < self.size

    @property
    def step(self) -> int:
        """The distance between neighbouring elements that are read."""
        return gcd(self.stride, self.dilation) if self.kernel > 1 else self.stride

    @property
    def steps(self) -> tuple[int, int]:
        """The distances between windows and between taps, in units of :attr:`step`."""
        return self.stride // self.step, self.dilation // self.step if self.kernel > 1 else 1

    def span(self, windows: Extent) -> Extent:
        """Return the number of elements, ``step`` apart, that consecutive windows span."""
        window, tap = self.steps
        return (windows - 1) * window + (self.kernel - 1) * tap + 1

    @property
    def inside(self) -> tuple[int, int]:
        """The range, in units of :attr:`step`, of the elements that are in bounds."""
        stop = min(self.span(self.number), ceil_div(self.size + self.before, self.step))
        return min(max(0, ceil_div(self.before, self.step)), stop), stop


#: Placeholder for an absent axis.
ONE = Windows(1, 1, 1, 0, 0, 1)
