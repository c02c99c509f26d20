"""The converter of resizing operators."""

from __future__ import annotations

import math

import numpy as np
from tvm import relax

from ._converters import Refused, _constant, _extents, _rank, _text
from ._symbolic import elements_of


def resize(bb, inputs, attrs, opset):
    """Resize spatial axes. The scales must be those of the extents, by which TVM computes."""
    data = inputs[0]
    rank, extents = _rank(data), _extents(data)
    scales, sizes, settings = _resize_settings(inputs, attrs, opset, rank)
    if scales is not None:
        sizes = [_scaled(extent, scale) for extent, scale in zip(extents, scales, strict=True)]
    for axis in range(2):
        if sizes[axis] is not extents[axis] and sizes[axis] != extents[axis]:
            raise Refused(f"it resizes the axis {axis}; TVM resizes axes from the third on")
    if rank not in (3, 4, 5):
        raise Refused(f"its operand has {rank} axes; TVM resizes tensors of 3, 4 and 5")
    if scales is not None:
        for extent, scale, size in zip(extents[2:], scales[2:], sizes[2:], strict=True):
            if isinstance(extent, int) and size != extent * float(scale):
                raise Refused(
                    f"the scale {scale:g} of the extent {extent} gives no whole extent; ONNX keeps the scale, and TVM "
                    f"computes by the extents. Give sizes in the place of scales"
                )
    if rank == 3:  # as a picture of height 1, for which Relax has the operator
        wide = relax.op.image.resize2d(
            bb.normalize(relax.op.expand_dims(data, 2)),
            relax.ShapeExpr([1, *sizes[2:]]),
            [0.0, 0.0, 0.0, 0.0],
            "NCHW",
            **settings,
        )
        return relax.op.squeeze(bb.normalize(wide), [2])
    resize = relax.op.image.resize2d if rank == 4 else relax.op.image.resize3d
    layout = "NCHW" if rank == 4 else "NCDHW"
    return resize(data, relax.ShapeExpr(sizes[2:]), [0.0] * (2 * (rank - 2)), layout, **settings)


def _scaled(extent, scale):
    if isinstance(extent, int):
        return math.floor(extent * float(scale))
    if float(scale) != int(scale):
        raise Refused(
            f"the scale {scale:g} of the extent {extent} is no integer; give the extents: shapes={{...}}"
        )
    return extent * int(scale) if int(scale) != 1 else extent


def _resize_settings(inputs, attrs: dict, opset: int, rank: int):
    """Return the scales or the sizes of all axes, and the settings of Relax's operator."""
    mode = _text(attrs, "mode", "nearest")
    if opset < 11:  # Upsample, and the first Resize
        scales = attrs.get("scales")
        scales = _constant(inputs[1], "scales") if scales is None else np.array(scales)
        return scales, None, _settings(mode, "asymmetric", "floor", {})
    coordinates = _text(attrs, "coordinate_transformation_mode", "half_pixel")
    rounding = _text(attrs, "nearest_mode", "round_prefer_floor")
    if coordinates in ("tf_crop_and_resize", "half_pixel_symmetric"):
        raise Refused(f"TVM does not have its coordinates {coordinates}; export it with half_pixel")
    if attrs.get("antialias", 0):
        raise Refused("TVM does not resize with antialias=1; export it without")
    if _text(attrs, "keep_aspect_ratio_policy", "stretch") != "stretch":
        raise Refused("TVM does not keep the aspect ratio; give the extents that result")
    scales, sizes = _constant(inputs[2], "scales"), _sizes(inputs, attrs)
    scales = None if scales is None or scales.size == 0 else scales
    axes = [axis % rank for axis in attrs.get("axes", range(rank))]
    if scales is not None:
        full = np.ones(rank)
        full[axes] = scales
        return full, None, _settings(mode, coordinates, rounding, attrs)
    extents = _extents(inputs[0])
    for axis, size in zip(axes, sizes, strict=True):
        extents[axis] = size
    return None, extents, _settings(mode, coordinates, rounding, attrs)


def _sizes(inputs, attrs: dict) -> list:
    known = elements_of(inputs, attrs, 3)
    if known is not None:
        return list(known.elements.flat)
    found = _constant(inputs[3], "sizes")
    return [] if found is None else [int(each) for each in found]


def _settings(mode: str, coordinates: str, rounding: str, attrs: dict) -> dict:
    return {
        "method": "nearest_neighbor" if mode == "nearest" else mode,
        "coordinate_transformation_mode": coordinates,
        "rounding_method": rounding if mode == "nearest" else "",
        "cubic_alpha": attrs.get("cubic_coeff_a", -0.75),
        "cubic_exclude": attrs.get("exclude_outside", 0),
        "extrapolation_value": attrs.get("extrapolation_value", 0.0),
    }


#: The converters of resizing operators.
RESIZING = {"Resize": resize, "Upsample": resize}
