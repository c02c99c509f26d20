"""Samples of vision operators and of their backward operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ...ir.compat import CAN_LEAVE_SOFTMAX_OUT
from ._sample import Sample, register_samples

# Multiples of 1/8, which are exact in half precision. Rounded coordinates would select other maxima
# in a region.
_ROIS = np.array(
    [
        [0, 0.25, 0.25, 3.125, 2.375],
        [1, -1.375, -1.125, 2.25, 2.25],  # partly outside
        [1, 1.25, 0.125, 2.875, 1.75],  # overlaps the one before
        [1, 3.125, 2.25, 1.25, 1.125],  # inside out
    ]
)
_SYMBOLIC = {0: {0: "n", 2: "h"}, 1: {0: "r"}}
_PRIORS = np.array([[[0.1, 0.2, 0.6, 0.9], [0.3, -0.2, 0.8, 0.4], [0.5, 0.5, 1.3, 0.7]]])


@register_samples("relax.vision.roi_align")
def roi_align(rng: np.random.Generator) -> Iterator[Sample]:
    for note, attrs in (
        ("as many samples as elements", {"pooled_size": (2, 1), "spatial_scale": 0.9}),
        (
            "aligned, in which a region can be empty",
            {"pooled_size": 2, "spatial_scale": 1.1, "aligned": True},
        ),
        ("two samples", {"pooled_size": 1, "spatial_scale": 1.0, "sample_ratio": 2}),
        (
            "the largest sample",
            {"pooled_size": (1, 2), "spatial_scale": 0.9, "sample_ratio": 2, "mode": "max"},
        ),
    ):
        yield Sample(
            [rng.normal(size=(2, 2, 3, 4)), _ROIS],
            attrs,
            wrt=[0],
            symbolic=_SYMBOLIC,
            note=note,
        )
    yield Sample(
        [rng.normal(size=(2, 3, 4, 2)), _ROIS],
        {"pooled_size": 2, "spatial_scale": 1.0, "mode": "max", "layout": "NHWC"},
        wrt=[0],
        note="the largest sample, channels last",
    )
    yield Sample(
        [rng.normal(size=(1, 1, 3, 4)), np.zeros((0, 5))],
        {"pooled_size": 2, "spatial_scale": 1.0},
        wrt=[0],
        note="no regions",
    )


@register_samples("relax.vision.roi_pool")
def roi_pool(rng: np.random.Generator) -> Iterator[Sample]:
    for note, attrs in (
        ("bins that overlap", {"pooled_size": (2, 3), "spatial_scale": 1.0}),
        ("empty bins", {"pooled_size": 2, "spatial_scale": 2.5}),
    ):
        yield Sample(
            [rng.permutation(24).reshape(2, 1, 3, 4) / 8, _ROIS],
            attrs,
            wrt=[0],
            symbolic=_SYMBOLIC,
            note=note,
        )


@register_samples("relax.grad.roi_align_backward_data")
def roi_align_backward_data(rng: np.random.Generator) -> Iterator[Sample]:
    yield from _roi_backward(rng, (4, 2, 1, 2), {"sample_ratio": 2, "mode": "max"})


@register_samples("relax.grad.roi_align_jvp")
def roi_align_jvp(rng: np.random.Generator) -> Iterator[Sample]:
    yield from _roi_backward(rng, (2, 2, 3, 4), {"sample_ratio": 2, "mode": "max"})


@register_samples("relax.grad.roi_pool_backward_data")
def roi_pool_backward_data(rng: np.random.Generator) -> Iterator[Sample]:
    yield from _roi_backward(rng, (4, 2, 1, 2), {})


@register_samples("relax.grad.roi_pool_jvp")
def roi_pool_jvp(rng: np.random.Generator) -> Iterator[Sample]:
    yield from _roi_backward(rng, (2, 2, 3, 4), {})


def _roi_backward(rng: np.random.Generator, shape: Sequence[int], attrs: Any) -> Iterator[Sample]:
    yield Sample(
        [rng.normal(size=shape), rng.permutation(48).reshape(2, 2, 3, 4) / 8.0, _ROIS],
        {"pooled_size": (1, 2), "spatial_scale": 1.0, **attrs},
        wrt=[0],
    )


@register_samples("relax.vision.multibox_transform_loc")
def multibox_transform_loc(rng: np.random.Generator) -> Iterator[Sample]:
    cases: list[tuple[str, dict[str, Any]]] = [
        ("softmax", {"variances": (0.1, 0.2, 0.3, 0.4)}),
        (
            "clipped, no background, some scores dropped",
            {"clip": True, "keep_background": False, "threshold": 0.3},
        ),
    ]
    if CAN_LEAVE_SOFTMAX_OUT:
        cases.append(("no softmax", {"apply_softmax": False, "threshold": 0.1}))
    for note, attrs in cases:
        yield Sample(
            [rng.normal(size=(2, 3, 3)), rng.normal(size=(2, 12)), _PRIORS],
            attrs,
            torch=_torch_multibox(**attrs),
            note=note,
        )
    yield Sample(
        [rng.normal(size=(2, 2, 3)), rng.normal(size=(2, 12)), _PRIORS],
        {"keep_background": False},
        tvm_order=1,
        symbolic={0: {0: "n"}, 1: {0: "n"}},
        note="a symbolic batch",
    )


def _torch_multibox(
    variances: Any = (1.0, 1.0, 1.0, 1.0),
    clip: Any = False,
    threshold: Any = 0.0,
    keep_background: Any = True,
    apply_softmax: Any = True,
) -> Callable[..., Any]:
    def forward(torch: Any, cls_pred: Any, loc_pred: Any, anchor: Any) -> Any:
        left, top, right, bottom = anchor.unbind(-1)
        x, y, w, h = (
            part * v
            for part, v in zip(loc_pred.unflatten(1, (-1, 4)).unbind(-1), variances, strict=True)
        )
        boxes = [None] * 4
        for axis, (low, high, offset, scale) in enumerate(
            ((top, bottom, y, h), (left, right, x, w))
        ):
            size = high - low
            middle = offset * size + (low + high) / 2
            half = scale.exp() * size / 2
            boxes[axis], boxes[axis + 2] = middle - half, middle + half
        boxes = torch.stack(boxes, -1)
        scores = cls_pred.softmax(1) if apply_softmax else cls_pred
        scores = torch.where(scores >= threshold, scores, 0.0)
        if not keep_background:
            scores = torch.cat([torch.zeros_like(scores[:, :1]), scores[:, 1:]], 1)
        return boxes.clamp(0, 1) if clip else boxes, scores

    return forward
