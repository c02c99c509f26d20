"""Tensor expressions of grid_sample and of its derivatives.

A sample is a weighted sum of a few elements of the data around it, its taps: two or four along each
spatial axis. The weight of a tap is the product of one weight for each axis. All values that depend
on the grid alone are computed once for all channels: the positions of the taps along each axis, and
their weights or a derivative of them along directions of the grid. A tap outside the data has the
position -1, and is neither read nor written, whatever the grid holds.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import te, tirx, topi
from tvm.script.ir_builder import tirx as T

from ..ir.dtypes import accumulation_dtype
from ._loops import Chunks, add, extern, loops, once
from .util import Shape, cast, fill_where_empty, is_empty, zeros

_SPLINE = -0.75
_NEAR = np.poly1d([_SPLINE + 2, -(_SPLINE + 3), 0, 1])
_FAR = np.poly1d([_SPLINE, -5 * _SPLINE, 8 * _SPLINE, -4 * _SPLINE])

#: The weights of an axis' taps, in order, as polynomials of the fractional part of the coordinate.
_WEIGHTS = {
    "nearest": [np.poly1d([1.0])],
    "bilinear": [np.poly1d([-1.0, 1.0]), np.poly1d([1.0, 0.0])],
    "bicubic": [
        _FAR(np.poly1d([1, 1])),
        _NEAR,
        _NEAR(np.poly1d([-1, 1])),
        _FAR(np.poly1d([-1, 2])),
    ],
}


@dataclass(frozen=True)
class _Axis:
    """The taps along one spatial axis, for every sample."""

    position: te.Tensor  # [N, tap, *sample], -1 outside the data
    fraction: te.Tensor  # [N, *sample]
    slope: te.Tensor  # [N, *sample], the derivative of the coordinate along the grid
    channel: int  # of the grid
    weights: list[np.poly1d]

    def weight(self, tap: tirx.PrimExpr, sample: Sequence, order: int) -> tirx.PrimExpr | None:
        """Return the derivative, of the given order, of a tap's weight along the grid; None if 0
        for all taps."""
        polynomials = [np.polyder(weight, order) if order else weight for weight in self.weights]
        if not any(polynomial.coeffs.any() for polynomial in polynomials):
            return None
        t = self.fraction(*sample)

        def const(value: float) -> tirx.PrimExpr:
            return tirx.const(float(value), t.ty.dtype)

        values = [
            functools.reduce(
                lambda total, c: total * t + const(c), p.coeffs[1:], const(p.coeffs[0])
            )
            for p in polynomials
        ]
        chosen = values[-1]
        for i, value in reversed(list(enumerate(values[:-1]))):
            chosen = tirx.Select(tap == i, value, chosen)
        for _ in range(order):
            chosen = chosen * self.slope(*sample)
        return chosen


def grid_sample_jvp(
    data: te.Tensor, grid: te.Tensor, directions: Sequence[te.Tensor], **attrs: Any
) -> te.Tensor:
    """Derivative of grid_sample along directions of the grid; grid_sample itself without
    directions.

    Parameters
    ----------
    data : te.Tensor
        The data.
    grid : te.Tensor
        The grid.
    directions : Sequence[te.Tensor]
        Directions, of the shape of the grid.
    **attrs
        ``method``, ``padding_mode`` and ``align_corners``, as ``relax.op.image.grid_sample`` takes
        them.

    Returns
    -------
    result : te.Tensor
        A tensor of the shape and the dtype of the samples; coordinates of half precision are
        computed, and sums accumulated, in float32.
    """
    batch, channels, *extents = data.shape
    shape = [batch, channels, *grid.shape[2:]]
    axes = _taps(grid, extents, **attrs)
    dtype = accumulation_dtype(data.dtype, grid.dtype)
    weights = _weights(axes, grid, directions, None, dtype)
    if weights is None or is_empty(shape) or is_empty(extents):
        return zeros(shape, data.dtype)
    taps = _tap_axes(axes)

    def element(n: tirx.PrimExpr, c: tirx.PrimExpr, *sample: tirx.PrimExpr) -> tirx.PrimExpr:
        return te.sum(
            _read(data, n, c, axes, taps, sample=sample, dtype=dtype) * weights(n, *taps, *sample),
            axis=taps,
        )

    return cast(te.compute(shape, element, name="grid_sample"), data.dtype)


def grid_sample_backward_data(
    output_grad: te.Tensor,
    grid: te.Tensor,
    directions: Sequence[te.Tensor],
    data_shape: Shape,
    **attrs: Any,
) -> te.Tensor:
    """Gradient of :func:`grid_sample_jvp` with respect to the data: each sample adds to its taps.

    Parameters
    ----------
    output_grad : te.Tensor
        The gradient with respect to the result.
    grid, directions, **attrs
        As for :func:`grid_sample_jvp`.
    data_shape : Sequence[int or PrimExpr]
        The shape of the data.

    Returns
    -------
    result : te.Tensor
        A tensor of shape ``data_shape`` in the dtype of ``output_grad``. A parallel task owns a
        channel of a batch element, or on a GPU some of its rows, so the order of the sums is always
        the same.
    """
    axes = _taps(grid, data_shape[2:], **attrs)
    dtype = accumulation_dtype(output_grad.dtype, grid.dtype)
    weights = _weights(axes, grid, directions, None, dtype)
    if weights is None or is_empty(data_shape) or is_empty(output_grad.shape):
        return zeros(data_shape, output_grad.dtype)
    rows = Chunks((), data_shape[2:-1], data_shape[:2])

    def body(grad: tirx.Buffer, weight: tirx.Buffer, *rest: tirx.Buffer) -> None:
        *positions, out = rest
        with rows.tasks() as ((n, c), own):
            with rows.own(own) as row, loops(data_shape[-1:]) as i:
                T.buffer_store(out, tirx.const(0, dtype), [n, c, *row, *i])
            with loops(grad.shape[2:]) as sample, loops([len(a.weights) for a in axes]) as taps:
                at = [once(p[(n, tap, *sample)]) for p, tap in zip(positions, taps, strict=True)]
                with (
                    rows.if_owned(own, at[:-1]),
                    T.If(tirx.all(*(i >= 0 for i in at))),
                    T.Then(),
                ):
                    value = grad[(n, c, *sample)].astype(dtype)
                    add(out, [n, c, *at], value * weight[(n, *taps, *sample)])

    inputs = [output_grad, weights, *(axis.position for axis in axes)]
    result = extern(body, inputs, data_shape, dtype, "grid_sample_backward_data")
    return cast(result, output_grad.dtype)


def grid_sample_backward_grid(
    output_grad: te.Tensor,
    data: te.Tensor,
    grid: te.Tensor,
    directions: Sequence[te.Tensor],
    **attrs: Any,
) -> te.Tensor:
    """Gradient of :func:`grid_sample_jvp` with respect to the grid.

    Parameters
    ----------
    output_grad : te.Tensor
        The gradient with respect to the result.
    data, grid, directions, **attrs
        As for :func:`grid_sample_jvp`.

    Returns
    -------
    result : te.Tensor
        A tensor of the shape and the dtype of the grid; half precision is accumulated in float32.
    """
    batch, channels, *extents = data.shape
    if is_empty([channels, *extents]) or is_empty(grid.shape):
        return zeros(grid.shape, grid.dtype)
    axes = _taps(grid, extents, **attrs)
    dtype = accumulation_dtype(data.dtype, grid.dtype)

    def part(weights: te.Tensor) -> te.Tensor:
        taps = _tap_axes(axes)
        channel = te.reduce_axis((0, channels), "channel")

        def element(n: tirx.PrimExpr, *sample: tirx.PrimExpr) -> tirx.PrimExpr:
            value = output_grad(n, channel, *sample).astype(dtype) * weights(n, *taps, *sample)
            tap = _read(data, n, channel, axes, taps, sample=sample, dtype=dtype)
            return te.sum(value * tap, axis=[*taps, channel])

        total = te.compute([batch, *grid.shape[2:]], element, name="grid_sample_backward_grid")
        return fill_where_empty(total, [channels])

    parts = {}
    for i, axis in enumerate(axes):
        weights = _weights(axes, grid, directions, i, dtype)
        if weights is not None:
            parts[axis.channel] = part(weights)
    if not parts:
        return zeros(grid.shape, grid.dtype)

    def joined(n: tirx.PrimExpr, channel: tirx.PrimExpr, *sample: tirx.PrimExpr) -> tirx.PrimExpr:
        value = tirx.const(0, dtype)
        for own, part in parts.items():
            value = tirx.if_then_else(channel == own, part(n, *sample), value)
        return value.astype(grid.dtype)

    return te.compute(grid.shape, joined, name="grid_gradient", tag=topi.tag.INJECTIVE)


@dataclass(frozen=True)
class _Coordinates:
    """The coordinates of samples along one spatial axis of the data.

    Attributes
    ----------
    grid : te.Tensor
        The grid.
    channel : int
        The channel of the axis in the grid.
    extent : int or PrimExpr
        The extent of the data.
    method, padding_mode, align_corners
        The attributes of the operator.
    """

    grid: te.Tensor
    channel: int
    extent: int | tirx.PrimExpr
    method: str
    padding_mode: str
    align_corners: bool

    @property
    def dtype(self) -> str:
        return accumulation_dtype(self.grid.dtype)

    @property
    def size(self) -> tirx.PrimExpr:
        return (tirx.const(1, "int64") * self.extent).astype(self.dtype)

    @property
    def last(self) -> tirx.PrimExpr:
        return self.size - self.const(1)

    @property
    def moves_samples(self) -> bool:
        """Whether samples are moved into the data; for bicubic, the taps are moved instead."""
        return self.method != "bicubic"

    def const(self, value: float) -> tirx.PrimExpr:
        return tirx.const(value, self.dtype)

    def at(self, n: tirx.PrimExpr, *sample: tirx.PrimExpr) -> tuple[tirx.PrimExpr, tirx.PrimExpr]:
        """Return the coordinate of a sample in the data, and its derivative along the grid."""
        const, size = self.const, self.size
        x = self.grid(n, self.channel, *sample).astype(self.dtype)
        if self.align_corners:
            x, slope = (x + const(1)) * self.last / const(2), self.last / const(2)
        else:
            x, slope = const(-0.5) + (x + const(1)) * size / const(2), size / const(2)
        if not self.moves_samples:
            return x, slope
        x, factor = self._moved(x)
        return x, slope * factor

    def position(self, x: tirx.PrimExpr, tap: tirx.PrimExpr) -> tirx.PrimExpr:
        """Return the position of a tap of the sample at a coordinate; -1 if it is outside the
        data."""
        const = self.const
        if self.method == "nearest":
            x = te.nearbyint(x)
        else:
            x = te.floor(x) + tap.astype(self.dtype) - const(1 if self.method == "bicubic" else 0)
        if not self.moves_samples:
            x, _ = self._moved(x)
        # Compare before the cast: NaN and huge numbers do not fit into an integer.
        inside = tirx.all(x >= const(0), x <= self.last)
        whole = tirx.Select(inside, x, const(0)).astype("int32")
        return tirx.Select(inside, whole, tirx.const(-1, "int32"))

    def _moved(self, x: tirx.PrimExpr) -> tuple[tirx.PrimExpr, tirx.PrimExpr]:
        """Return a coordinate or a position moved into the data, and its derivative."""
        const, last, slope = self.const, self.last, self.const(1)
        if self.padding_mode == "reflection":
            x, slope = self._reflected(x)
        if self.padding_mode in ("border", "reflection"):
            slope = tirx.Select(tirx.all(x > const(0), x < last), slope, const(0))
            x = tirx.min(tirx.max(x, const(0)), last)
        return x, slope

    def _reflected(self, x: tirx.PrimExpr) -> tuple[tirx.PrimExpr, tirx.PrimExpr]:
        """Return the reflection of a coordinate, and its derivative."""
        const = self.const
        low, span = (const(0), self.last) if self.align_corners else (const(-0.5), self.size)
        distance = tirx.abs(x - low)
        turns = te.floor(te.floor(distance) / tirx.max(span, const(1)))
        rest = distance - turns * span
        even = turns - const(2) * te.floor(turns / const(2)) == const(0)
        inside = tirx.all(x >= low, x <= low + span)
        value = tirx.Select(even, rest + low, span - rest + low)
        sign = tirx.Select(even, const(1), const(-1))
        sign = tirx.Select(x < low, -sign, sign)
        return tirx.Select(inside, x, value), tirx.Select(inside, const(1), sign)


def _taps(
    grid: te.Tensor, extents: Shape, method: str, padding_mode: str, align_corners: bool
) -> list[_Axis]:
    """Return the taps along each spatial axis, in the order D, H, W; the grid has x first."""
    weights = _WEIGHTS[method]
    batch, sample_shape = grid.shape[0], list(grid.shape[2:])

    def axis(channel: int, extent: int | tirx.PrimExpr) -> _Axis:
        where = _Coordinates(
            grid,
            channel,
            extent,
            method=method,
            padding_mode=padding_mode,
            align_corners=align_corners,
        )
        places = te.compute([batch, *sample_shape], lambda *at: where.at(*at)[0], name="place")
        return _Axis(
            te.compute(
                [batch, len(weights), *sample_shape],
                lambda n, tap, *at: where.position(places(n, *at), tap),
                name="position",
            ),
            te.compute(
                places.shape, lambda *at: places(*at) - te.floor(places(*at)), name="fraction"
            ),
            te.compute(places.shape, lambda *at: where.at(*at)[1], name="slope"),
            channel,
            weights,
        )

    return [axis(len(extents) - 1 - i, extent) for i, extent in enumerate(extents)]


def _weights(
    axes: Sequence[_Axis],
    grid: te.Tensor,
    directions: Sequence[te.Tensor],
    extra: int | None,
    dtype: str,
) -> te.Tensor | None:
    """Return the derivative of every tap's weight along the directions, and along one axis'
    coordinate.

    The tensor has the axes ``[N, *taps, *sample]``; None if it is 0 everywhere.
    """
    count = len(axes)

    def element(n: tirx.PrimExpr, *at: tirx.PrimExpr) -> tirx.PrimExpr:
        taps, sample = at[:count], (n, *at[count:])
        terms = []
        # Each direction moves the coordinate of one axis.
        for moved in itertools.product(range(count), repeat=len(directions)):
            factors: list[Any] = [
                axis.weight(taps[i], sample, moved.count(i) + (i == extra))
                for i, axis in enumerate(axes)
            ]
            if any(factor is None for factor in factors):
                continue
            factors += [
                direction(n, axes[i].channel, *sample[1:])
                for i, direction in zip(moved, directions, strict=True)
            ]
            terms.append(
                functools.reduce(operator.mul, (factor.astype(dtype) for factor in factors))
            )
        return functools.reduce(operator.add, terms)

    order = len(directions) + (extra is not None)
    degree = max(weight.order for weight in axes[0].weights)
    if order > count * degree:
        return None
    shape = [grid.shape[0], *(len(axis.weights) for axis in axes), *grid.shape[2:]]
    return te.compute(shape, element, name="weights")


def _tap_axes(axes: Sequence[_Axis]) -> list[tirx.IterVar]:
    return [te.reduce_axis((0, len(axis.weights)), f"tap{i}") for i, axis in enumerate(axes)]


def _read(
    data: te.Tensor,
    n: tirx.PrimExpr,
    channel: tirx.PrimExpr,
    axes: Sequence[_Axis],
    taps: Sequence[tirx.PrimExpr],
    sample: Sequence[tirx.PrimExpr],
    dtype: str,
) -> tirx.PrimExpr:
    """Read a tap; 0 for a tap outside the data."""
    at = [axis.position(n, tap, *sample) for axis, tap in zip(axes, taps, strict=True)]
    return tirx.if_then_else(
        tirx.all(*(i >= 0 for i in at)),
        data(n, channel, *at).astype(dtype),
        tirx.const(0, dtype),
    )
