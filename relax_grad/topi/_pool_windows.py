"""The windows of pooling along the spatial axes of any layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import te, tirx

from ..ir.layout import Index, Layout
from .util import Shape, spread

#: The spatial axes in the order in which sizes, strides, padding and dilation are given.
_SPATIAL = "DHW"


def spatial_axes(layout: Layout) -> str:
    """Return the spatial axes of a layout in the order of the attributes."""
    return "".join(name for name in _SPATIAL if name in layout.names)


@dataclass(frozen=True)
class PoolWindows:
    """The geometry of the windows of a pooling; every sequence has one item for each spatial
    axis."""

    names: str
    sizes: Sequence[int]
    strides: Sequence[int]
    before: Sequence[int]
    after: Sequence[int]
    dilation: Sequence[int]

    @classmethod
    def of(
        cls,
        layout: Layout,
        pool_size: Sequence[int],
        strides: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
    ) -> PoolWindows:
        names = spatial_axes(layout)
        # block_builder.call_te converts integers to expressions.
        sizes, strides, padding, dilation = (
            [int(value) for value in values] for values in (pool_size, strides, padding, dilation)
        )
        before, after = padding[: len(names)], padding[len(names) :]
        return cls(names, sizes, strides, before=before, after=after, dilation=dilation)

    def taps(self) -> list[tirx.IterVar]:
        """Return one reduction axis for each spatial axis, over the taps of a window."""
        return [
            te.reduce_axis((0, size), f"k{name.lower()}")
            for name, size in zip(self.names, self.sizes, strict=True)
        ]

    def flat(self, taps: Sequence[tirx.PrimExpr]) -> tirx.PrimExpr:
        """Return a tap's position in its window, row by row."""
        position = taps[0]
        for size, tap in zip(self.sizes[1:], taps[1:], strict=True):
            position = position * size + tap
        return position

    def unflat(self, position: tirx.PrimExpr) -> list[tirx.PrimExpr]:
        """Return the tap at a position of its window."""
        taps: list[tirx.PrimExpr] = []
        for size in reversed(self.sizes):
            taps.insert(0, tirx.floormod(position, size))
            position = tirx.floordiv(position, size)
        return taps

    def element(self, window: Index, taps: Sequence[tirx.PrimExpr]) -> dict:
        """Return the element of the data, or of its padding, at a tap of a window."""
        at = dict(window)
        for name, stride, before, step, tap in zip(
            self.names, self.strides, self.before, self.dilation, taps, strict=True
        ):
            at[name] = window[name] * stride + tap * step - before
        return at

    def inside(self, element: Index, extents: Index, filled_up: Sequence[str]) -> tirx.PrimExpr:
        """Tell whether an element lies in the data, and not in its padding or in the filling of a
        packed layout."""
        bounds = [
            bound
            for name in self.names
            for bound in (element[name] >= 0, element[name] < extents[name])
        ]
        return tirx.all(*bounds, *(element[name] < extents[name] for name in filled_up))

    def spread(
        self,
        tensor: te.Tensor,
        data_shape: Shape,
        layout: Layout,
        out_layout: Layout,
        dtype: str,
        fill: int = 0,
    ) -> te.Tensor:
        """Copy a tensor of one element per window, in ``out_layout``, to the positions of
        :meth:`spread_index`.

        Window ``o`` goes to ``o * s + (K - 1) * d - p``, and ``fill`` to positions without a
        window.
        """
        extents = [data_shape[axis] for axis in layout.positions(self.names)]
        reach = [(size - 1) * step for size, step in zip(self.sizes, self.dilation, strict=True)]
        return spread(
            tensor,
            out_layout.positions(self.names),
            extents=[extent + r for extent, r in zip(extents, reach, strict=True)],
            origins=[r - before for r, before in zip(reach, self.before, strict=True)],
            steps=self.strides,
            dtype=dtype,
            fill=fill,
        )

    def spread_index(self, element: Index, taps: Sequence[tirx.PrimExpr]) -> dict:
        """Return the position in a spread tensor of the window that has the element as the given
        tap.

        The taps are counted from the last one, so that no index decreases in a loop variable: TVM's
        simplification of iteration maps gets the floor of a decreasing index wrong.
        """
        at = dict(element)
        for name, step, tap in zip(self.names, self.dilation, taps, strict=True):
            at[name] = element[name] + tap * step
        return at

    def count(self, window: Index, extents: Index, include_pad: bool) -> tirx.PrimExpr:
        """Return the divisor of average pooling for a window; at least 1."""
        total = 1
        for name, size, stride, before, after, step in zip(
            self.names,
            self.sizes,
            self.strides,
            self.before,
            self.after,
            self.dilation,
            strict=True,
        ):
            start = window[name] * stride - before
            first = 0 if include_pad else tirx.floordiv(tirx.max(-start, 0) + step - 1, step)
            end = extents[name] + (after if include_pad else 0)
            last = tirx.min(size - 1, tirx.floordiv(end - 1 - start, step))
            total *= tirx.max(last - first + 1, 1)
        return total
