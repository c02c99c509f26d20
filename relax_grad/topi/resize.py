"""Tensor expressions of resizing and of its gradient.

A resize is linear in the data (except for the extrapolation value) and separable: along each
spatial axis, output ``x`` is a sum of a few elements, its taps, with weights that depend on ``x``
only. :class:`Axis` defines the taps and the weights for both the forward and the backward
expression. The formulas are those of ``topi.image.resize2d``, which follow ONNX's Resize.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import te, tirx, topi

from ..ir.dtypes import accumulation_dtype
from .position import as_int64
from .util import (
    Shape,
    at_least_1,
    axes,
    cast,
    fill_where_empty,
    is_empty,
    is_static,
    spatial_names,
    zeros,
)

#: The tolerance for rounding errors when a coordinate that should be an integer is rounded up or
#: down.
_EPSILON = 1e-5


@dataclass(frozen=True)
class Axis:
    """The resize of one axis.

    Attributes
    ----------
    extent : PrimExpr
        The extent of the data.
    size : PrimExpr
        The extent of the result.
    method : str
        ``"nearest_neighbor"``, ``"linear"`` or ``"cubic"``.
    mode : str
        The coordinate transformation mode.
    rounding : str
        The rounding method of ``nearest_neighbor``.
    cubic_alpha : float
        The coefficient of the cubic spline.
    cubic_exclude : bool
        Whether taps outside the data have weight 0, instead of reading the element at the border.
    roi : tuple[float, float]
        Begin and end of the region of interest, for ``tf_crop_and_resize``.
    dtype : str
        The dtype of coordinates and weights.
    """

    extent: tirx.PrimExpr
    size: tirx.PrimExpr
    method: str
    mode: str
    rounding: str
    cubic_alpha: float
    cubic_exclude: bool
    roi: tuple[float, float]
    dtype: str

    @property
    def crops(self) -> bool:
        """Whether outputs outside the data take the extrapolation value."""
        return self.mode == "tf_crop_and_resize"

    def coordinate(self, x: tirx.PrimExpr) -> tirx.PrimExpr:
        """Return the coordinate of an output in the data.

        The order of the operations is topi's, so that ``nearest_neighbor`` rounds
        identically. A compiler that fuses multiplications and additions may still break a tie
        differently in two functions.
        """
        scale = self._ratio(self.extent, self.size)
        at = self._float(x)
        if self.mode == "half_pixel":
            return (at + self._const(0.5)) * scale - self._const(0.5)
        if self.mode == "pytorch_half_pixel":
            return self._if_several(
                lambda: (at + self._const(0.5)) * scale - self._const(0.5), self._const(0)
            )
        if self.mode == "align_corners":
            return self._ratio(self.extent - 1, self.size - 1) * at
        if self.mode == "asymmetric":
            return scale * at
        if self.mode == "tf_half_pixel_for_nn":
            return (at + self._const(0.5)) * scale
        if self.crops:
            begin, end = self.roi
            last = self._float(self.extent - 1)
            return self._if_several(
                lambda: (
                    self._const(begin) * last
                    + at * self._const(end - begin) * last / self._float(self.size - 1)
                ),
                self._const(0.5 * (begin + end)) * last,
            )
        raise ValueError(f"unknown coordinate_transformation_mode {self.mode!r}")

    def taps(self, x: tirx.PrimExpr) -> list[tuple[tirx.PrimExpr, tirx.PrimExpr]]:
        """Return the taps of an output, and their weights."""
        at = self.coordinate(x)
        if self.method == "nearest_neighbor":
            return [(self._clipped(self._nearest(at)), self._const(1))]
        whole = te.floor(at)
        fraction = at - whole
        first = whole.astype("int32")
        if self.method == "linear":
            return [
                (self._clipped(first), self._const(1) - fraction),
                (self._clipped(first + 1), fraction),
            ]
        if self.method != "cubic":
            raise ValueError(f"unknown method {self.method!r} of resizing")
        positions = [first + i for i in (-1, 0, 1, 2)]
        weights = self._cubic(fraction)
        if self.cubic_exclude:
            weights = [
                tirx.if_then_else(
                    tirx.any(position < 0, position >= self.extent), self._const(0), weight
                )
                for position, weight in zip(positions, weights, strict=True)
            ]
            total = functools.reduce(operator.add, weights)
            weights = [weight / total for weight in weights]
        return [(self._clipped(p), w) for p, w in zip(positions, weights, strict=True)]

    def inside(self, x: tirx.PrimExpr) -> tirx.PrimExpr:
        """Return the condition that an output lies in the data."""
        at = self.coordinate(x)
        return tirx.all(at >= self._const(0), at <= self._float(self.extent - 1))

    def window_length(self) -> tirx.PrimExpr:
        """Return the largest number of outputs that may share a tap."""
        if self.crops:  # coordinates may decrease, or all be equal
            return self.size
        rise, run = self._slope()
        return tirx.min(tirx.floordiv(2 * self._reach * rise + run - 1, run) + 2, self.size)

    def window_begin(self, i: tirx.PrimExpr) -> tirx.PrimExpr:
        """Return the first output that may have element ``i`` as a tap.

        The coordinate increases with the output, and an element is a tap if it is less than
        ``_reach`` away. The arithmetic is in integers, so that no rounding error moves the window
        off a tap.
        """
        if self.crops:
            return tirx.const(0, "int64")
        rise, run = self._slope()
        begin = i - self._reach
        if self.mode in ("half_pixel", "pytorch_half_pixel"):
            above, below = (2 * begin + 1) * rise - run, 2 * run
        elif self.mode == "tf_half_pixel_for_nn":
            above, below = 2 * begin * rise - run, 2 * run
        else:
            above, below = begin * rise, run
        return tirx.floordiv(tirx.max(above, 0), below)

    @property
    def _reach(self) -> int:
        return 2 if self.method == "cubic" else 1

    def _slope(self) -> tuple[tirx.PrimExpr, tirx.PrimExpr]:
        """Return the outputs per element as a ratio: a number of outputs, and a number of
        elements."""
        if self.mode == "align_corners":
            return self.size - 1, at_least_1(self.extent - 1)
        return self.size, at_least_1(self.extent)

    def _ratio(self, a: tirx.PrimExpr, b: tirx.PrimExpr) -> tirx.PrimExpr:
        """Divide two extents, or two extents minus 1; 0 for a static divisor that is not
        positive."""
        if is_static(b):
            return self._float(a) / self._float(b) if int(b) > 0 else self._const(0)
        # If b is 0, there is one output, with number 0, and this ratio is multiplied by that
        # number. (TVM does not compile a product with a plain quotient of two symbolic extents.)
        return self._float(a) / tirx.max(self._float(b), self._const(1))

    def _if_several(
        self, value: Callable[[], tirx.PrimExpr], otherwise: tirx.PrimExpr
    ) -> tirx.PrimExpr:
        """Return ``value()``, which may divide by the number of outputs minus 1, or ``otherwise``
        for one output."""
        if is_static(self.size):
            return value() if int(self.size) > 1 else otherwise
        return tirx.if_then_else(self.size > 1, value(), otherwise)

    def _nearest(self, at: tirx.PrimExpr) -> tirx.PrimExpr:
        rounding = self.rounding
        if not rounding:
            rounding = "round" if self.mode == "align_corners" else "floor"
        if rounding == "round":
            at = te.round(at)
        elif rounding == "round_prefer_floor":
            at = te.ceil(at - self._const(0.5))
        elif rounding == "round_prefer_ceil":
            at = te.floor(at + self._const(0.5))
        elif rounding == "floor":
            at = te.floor(at + self._const(_EPSILON))
        elif rounding == "ceil":
            at = te.ceil(at - self._const(_EPSILON))
        else:
            raise ValueError(f"unknown rounding_method {rounding!r}")
        return at.astype("int32")

    def _cubic(self, t: tirx.PrimExpr) -> list[tirx.PrimExpr]:
        """Return the weights of the four nearest elements, at the fraction ``t`` after the
        second."""
        alpha, const = self.cubic_alpha, self._const
        t2 = t * t
        t3 = t2 * t
        return [
            const(alpha) * (t3 - const(2) * t2 + t),
            const(alpha + 2) * t3 - const(3 + alpha) * t2 + const(1),
            const(-(alpha + 2)) * t3 + const(3 + 2 * alpha) * t2 - const(alpha) * t,
            const(alpha) * t2 - const(alpha) * t3,
        ]

    def _clipped(self, position: tirx.PrimExpr) -> tirx.PrimExpr:
        return tirx.max(tirx.min(position.astype("int64"), self.extent - 1), 0)

    def _float(self, value: tirx.PrimExpr) -> tirx.PrimExpr:
        return value.astype(self.dtype)

    def _const(self, value: float) -> tirx.PrimExpr:
        return tirx.const(value, self.dtype)


def resize(
    data: te.Tensor,
    size: Shape,
    layout: str,
    out_dtype: str,
    extrapolation_value: float,
    **attrs: Any,
) -> te.Tensor:
    """Resize the spatial axes: ``topi.image.resize2d`` and ``resize3d`` for any layout and dtype.

    Data of float64 is interpolated in float64, anything else in float32.

    Parameters
    ----------
    data : te.Tensor
        The data.
    size : Sequence[int or PrimExpr]
        The spatial extents of the result, in the order D, H, W.
    layout : str
        A permutation of ``"NCHW"`` or ``"NCDHW"``.
    out_dtype : str
        The dtype of the result.
    extrapolation_value : float
        The result where an output lies outside the data, for ``tf_crop_and_resize``.
    **attrs
        ``roi``, ``method``, ``coordinate_transformation_mode``, ``rounding_method``,
        ``cubic_alpha`` and ``cubic_exclude``, as ``relax.op.image.resize2d`` takes them; for three
        axes, ``roi`` is ``[start_w, start_h, start_d, end_w, end_h, end_d]``, as in topi.

    Returns
    -------
    result : te.Tensor
        A tensor of the layout of the data.
    """
    spatial = axes(layout, spatial_names(layout, "NC"))
    shape = list(data.shape)
    for axis, extent in zip(spatial, size, strict=True):
        shape[axis] = extent
    if is_empty(shape):
        return zeros(shape, out_dtype)
    rules = _axes([data.shape[axis] for axis in spatial], size, data.dtype, **attrs)
    dtype = "float64" if data.dtype == "float64" else "float32"

    def element(*index: tirx.PrimExpr) -> tirx.PrimExpr:
        per_axis = [rule.taps(index[axis]) for rule, axis in zip(rules, spatial, strict=True)]
        terms = []
        for taps in itertools.product(*per_axis):
            at = list(index)
            for axis, (position, _) in zip(spatial, taps, strict=True):
                at[axis] = position
            if len(per_axis[0]) == 1:  # one tap, of weight 1: copied in any dtype
                return data(*at).astype(out_dtype)
            weight = functools.reduce(operator.mul, (weight for _, weight in taps))
            terms.append(weight.astype(dtype) * data(*at).astype(dtype))
        return functools.reduce(operator.add, terms).astype(out_dtype)

    def cropped(*index: tirx.PrimExpr) -> tirx.PrimExpr:
        inside = [rule.inside(index[axis]) for rule, axis in zip(rules, spatial, strict=True)]
        return tirx.if_then_else(
            tirx.all(*inside), element(*index), tirx.const(extrapolation_value, out_dtype)
        )

    return te.compute(
        shape, cropped if rules[0].crops else element, name="resize", tag=topi.tag.INJECTIVE
    )


def resize_backward_data(
    output_grad: te.Tensor, data_shape: Shape, layout: str, out_dtype: str, **attrs: Any
) -> te.Tensor:
    """Gradient of a resize with respect to its data: the transpose of :func:`resize`.

    One spatial axis after the other, each element sums the outputs that have it as a tap. These
    outputs are in a window whose first output and length follow from the extents, so an axis costs
    a few multiplications for each element; ``tf_crop_and_resize`` loops over every output.

    Parameters
    ----------
    output_grad : te.Tensor
        The gradient with respect to the result.
    data_shape : Sequence[int or PrimExpr]
        The shape of the data.
    layout : str
        The layout of ``output_grad`` and of the data.
    out_dtype : str
        The dtype of the data.
    **attrs
        As for :func:`resize`.

    Returns
    -------
    result : te.Tensor
        A tensor of shape ``data_shape`` in ``out_dtype``; half precision is accumulated in float32.
    """
    if is_empty(data_shape) or is_empty(output_grad.shape):
        return zeros(data_shape, out_dtype)
    spatial = axes(layout, spatial_names(layout, "NC"))
    rules = _axes(
        [data_shape[axis] for axis in spatial],
        [output_grad.shape[axis] for axis in spatial],
        out_dtype,
        **attrs,
    )
    total = output_grad
    for axis, rule in zip(spatial, rules, strict=True):
        total = _transpose(total, axis, rule, accumulation_dtype(output_grad.dtype, out_dtype))
    return cast(total, out_dtype)


def _transpose(grad: te.Tensor, axis: int, rule: Axis, dtype: str) -> te.Tensor:
    """Apply the transpose of the resize of one axis."""
    count = rule.window_length()
    first = te.compute((rule.extent,), lambda i: rule.window_begin(i), name="first")

    def weight(i: tirx.PrimExpr, k: tirx.PrimExpr) -> tirx.PrimExpr:
        x = first(i) + k
        total = functools.reduce(
            operator.add,
            (
                tirx.Select(position == i, weight.astype(dtype), tirx.const(0, dtype))
                for position, weight in rule.taps(x)
            ),
        )
        valid = tirx.all(x < rule.size, rule.inside(x)) if rule.crops else x < rule.size
        return tirx.Select(valid, total, tirx.const(0, dtype))

    weights = te.compute((rule.extent, count), weight, name="weights")
    shape = list(grad.shape)
    shape[axis] = rule.extent
    k = te.reduce_axis((0, count), "k")

    def element(*index: tirx.PrimExpr) -> tirx.PrimExpr:
        i = index[axis]
        at = list(index)
        at[axis] = tirx.min(first(i) + k, rule.size - 1)
        # An output without this tap contributes nothing, not even NaN.
        term = tirx.Select(
            weights(i, k) != 0, weights(i, k) * grad(*at).astype(dtype), tirx.const(0, dtype)
        )
        return te.sum(term, axis=k)

    total = te.compute(shape, element, name="resize_backward")
    return fill_where_empty(total, [rule.size])


def _axes(
    extents: Shape,
    size: Shape,
    dtype: str,
    *,
    roi: Sequence[float],
    method: str,
    coordinate_transformation_mode: str,
    rounding_method: str,
    cubic_alpha: float,
    cubic_exclude: bool,
) -> list[Axis]:
    method = method.lower()
    # The nearest element must not depend on the dtype.
    if dtype != "float64" or method == "nearest_neighbor":
        dtype = "float32"
    ndim = len(extents)
    regions = list(zip(roi[:ndim], roi[ndim:], strict=True))
    if ndim == 3:  # topi reads roi from the last axis on
        regions.reverse()
    return [
        Axis(
            as_int64(extent),
            as_int64(target),
            method,
            mode=coordinate_transformation_mode,
            rounding=rounding_method,
            cubic_alpha=cubic_alpha,
            cubic_exclude=cubic_exclude,
            roi=region,
            dtype=dtype,
        )
        for extent, target, region in zip(extents, size, regions, strict=True)
    ]
