"""The converter of resizing operators."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
from tvm import relax

from ..extents.values import Extents, is_symbolic
from .converters import (
    Attrs,
    Builder,
    Converter,
    Inputs,
    Refused,
    _constant,
    _extents,
    _rank,
    _text,
)
from .interpolate import Region, Settings, interpolated
from .symbolic import elements_of

#: The largest denominator of a scale that is taken for a fraction: 0.7 is seven tenths, and not the
#: nearest number of float32.
_LARGEST_DENOMINATOR = 1000

#: The coordinates that Relax's operators do not have.
_OWN_COORDINATES = ("half_pixel_symmetric", "tf_crop_and_resize")


class _Axis(NamedTuple):
    """The new extent of an axis, its scale if the node has one, and whether the scale is the
    quotient of the extents."""

    size: object
    scale: float | None
    is_quotient: bool


def resize(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> relax.Expr | None:
    """Resize by Relax's operator where it has the settings, and else axis by axis by the places of
    the elements."""
    data = inputs[0]
    rank, shape = _rank(data), _extents(data)
    settings, axes, regions = _settings(inputs, attrs, opset, shape)
    changed = [i for i in range(rank) if axes[i].size is not shape[i] and axes[i].size != shape[i]]
    changed += [i for i in regions if i not in changed]
    is_known = (
        rank in (3, 4, 5)
        and min(changed, default=2) > 1
        and settings.coordinates not in _OWN_COORDINATES
        and not settings.smooth
        and all(axes[i].is_quotient for i in changed)
    )
    if is_known:
        return _by_operator(bb, data, [axis.size for axis in axes[2:]], settings)
    for i in changed:
        region = regions.get(i, Region())
        data = interpolated(
            bb, data, i, axes[i].size, axes[i].scale, settings=settings, region=region
        )
    return data


def _by_operator(bb: Builder, data: relax.Expr, sizes: Sequence, settings: Settings) -> relax.Expr:
    options = {
        "method": "nearest_neighbor" if settings.mode == "nearest" else settings.mode,
        "coordinate_transformation_mode": settings.coordinates,
        "rounding_method": settings.rounding if settings.mode == "nearest" else "",
        "cubic_alpha": settings.cubic,
        "cubic_exclude": int(settings.excludes),
        "extrapolation_value": settings.extrapolated,
    }
    rank = _rank(data)
    if rank == 3:  # as a picture of height 1, for which Relax has the operator
        wide = bb.normalize(relax.op.expand_dims(data, 2))
        shape = relax.ShapeExpr([1, *sizes])
        wide = relax.op.image.resize2d(wide, shape, [0.0] * 4, "NCHW", **options)
        return relax.op.squeeze(bb.normalize(wide), [2])
    function = relax.op.image.resize2d if rank == 4 else relax.op.image.resize3d
    layout = "NCHW" if rank == 4 else "NCDHW"
    return function(data, relax.ShapeExpr(sizes), [0.0] * (2 * (rank - 2)), layout, **options)


def _settings(inputs: Inputs, attrs: Attrs, opset: int, shape: list) -> tuple:
    """Return the settings, the new axes, and the regions of axes that are cropped."""
    mode, rank = _text(attrs, "mode", "nearest"), len(shape)
    if opset < 11:  # Upsample, and the first Resize
        scales = attrs.get("scales")
        scales = _constant(inputs[1], "scales") if scales is None else scales
        return Settings(mode, "asymmetric", "floor"), _scaled(shape, range(rank), scales), {}
    settings = Settings(
        mode,
        _text(attrs, "coordinate_transformation_mode", "half_pixel"),
        _text(attrs, "nearest_mode", "round_prefer_floor"),
        cubic=attrs.get("cubic_coeff_a", -0.75),
        excludes=bool(attrs.get("exclude_outside", 0)),
        extrapolated=attrs.get("extrapolation_value", 0.0),
        smooth=bool(attrs.get("antialias", 0)),
    )
    axes = [axis % rank for axis in attrs.get("axes", range(rank))]
    regions = {}
    if settings.coordinates == "tf_crop_and_resize":
        region = _constant(inputs[1], "roi")
        if region is None:
            raise Refused("it crops to the region roi, which it lacks")
        roi = region.tolist()
        regions = {
            axis: Region(roi[i], roi[i + len(axes)])
            for i, axis in enumerate(axes)
            if (roi[i], roi[i + len(axes)]) != (0, 1)
        }
    scales = _constant(inputs[2], "scales")
    if scales is not None and scales.size:
        return settings, _scaled(shape, axes, scales), regions
    policy = _text(attrs, "keep_aspect_ratio_policy", "stretch")
    return settings, _sized(shape, axes, _sizes(inputs, attrs), policy), regions


def _scaled(shape: list, axes: Sequence[int], scales: Any) -> list[_Axis]:
    """Return the extents times scales, rounded down."""
    result, extents = [_Axis(length, None, True) for length in shape], Extents()
    for axis, scale in zip(axes, scales, strict=True):
        number = Fraction(float(np.float32(scale)))
        short = number.limit_denominator(_LARGEST_DENOMINATOR)
        number = short if np.float32(float(short)) == np.float32(scale) else number
        top, bottom = number.as_integer_ratio()
        extent = shape[axis]
        if is_symbolic(extent):
            is_quotient = bottom == 1
            size = extents.quotient([extent, top], [bottom]) if top != bottom else extent
        else:
            is_quotient = extent * top % bottom == 0
            size = extent * top // bottom
        result[axis] = _Axis(size, float(scale), is_quotient)
    return result


def _sized(shape: list, axes: Sequence[int], sizes: list, policy: str) -> list[_Axis]:
    result = [_Axis(extent, None, True) for extent in shape]
    pairs = list(zip(axes, sizes, strict=True))
    if policy == "stretch":
        for axis, size in pairs:
            result[axis] = _Axis(size, None, True)
        return result
    extents = [shape[axis] for axis in axes]
    if any(map(is_symbolic, [*extents, *sizes])):
        raise Refused(
            f"it keeps the aspect ratio of the extents {extents}, some of which are symbolic; "
            "give them: shapes={...}"
        )
    choose = min if policy == "not_larger" else max
    scale = choose(size / shape[axis] for axis, size in pairs)
    for axis in axes:
        size = int(scale * shape[axis] + 0.5)
        result[axis] = _Axis(size, scale, size == scale * shape[axis])
    return result


def _sizes(inputs: Inputs, attrs: Attrs) -> list:
    known = elements_of(inputs, attrs, 3)
    if known is not None:
        return list(known.elements.flat)
    sizes = _constant(inputs[3], "sizes")
    return [] if sizes is None else [int(size) for size in sizes]


#: The converters of resizing operators.
RESIZING: dict[str, Converter] = {"Resize": resize, "Upsample": resize}
