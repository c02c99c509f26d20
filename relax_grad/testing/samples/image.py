"""Samples of image operators and of their backward operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ._sample import Sample, register_samples


@register_samples("relax.image.resize2d")
def resize2d(rng: np.random.Generator) -> Iterator[Sample]:
    def sample(
        note: str,
        shape: Sequence[int],
        size: Sequence[int],
        symbolic: Any = None,
        torch: Any = None,
        **attrs: Any,
    ) -> Sample:
        return Sample(
            [rng.normal(size=shape)],
            {"size": size, **attrs},
            symbolic={0: symbolic or {0: "n"}},
            torch=torch and _torch_resize(size, **torch),
            note=note,
        )

    yield sample(
        "up and down, symbolic images",
        (2, 1, 2, 5),
        (5, 3),
        {0: "n", 2: "h", 3: "w"},
        torch={"mode": "bilinear"},
    )
    yield sample(
        "corners aligned",
        (1, 2, 3, 2),
        (2, 4),
        torch={"mode": "bilinear", "align_corners": True},
        coordinate_transformation_mode="align_corners",
    )
    yield sample(
        "corners aligned to one element",
        (1, 2, 3, 4),
        (1, 3),
        torch={"mode": "bilinear", "align_corners": True},
        coordinate_transformation_mode="align_corners",
    )
    yield sample("cubic", (1, 2, 3, 4), (5, 2), torch={"mode": "bicubic"}, method="cubic")
    yield sample(
        "cubic that excludes the outside, channels last",
        (1, 4, 2, 2),
        (3, 5),
        {0: "n", 1: "h"},
        layout="NHWC",
        method="cubic",
        cubic_alpha=-0.5,
        cubic_exclude=1,
        coordinate_transformation_mode="pytorch_half_pixel",
    )
    yield sample(
        "nearest, symbolic images",
        (1, 2, 3, 4),
        (5, 2),
        {0: "n", 3: "w"},
        torch={"mode": "nearest"},
        method="nearest_neighbor",
        coordinate_transformation_mode="asymmetric",
        rounding_method="floor",
    )
    yield sample(
        "a region, backwards along one axis, partly outside",
        (1, 2, 4, 3),
        (3, 4),
        roi=(0.9, -0.15, 0.2, 1.1),
        coordinate_transformation_mode="tf_crop_and_resize",
        extrapolation_value=2.5,
    )
    yield Sample(
        [rng.normal(size=(1, 1, 2, 2)).astype("float32")],
        {"size": (3, 3), "out_dtype": "float16"},
        dtypes=("float32",),
        note="out_dtype",
    )


@register_samples("relax.image.resize3d")
def resize3d(rng: np.random.Generator) -> Iterator[Sample]:
    yield Sample(
        [rng.normal(size=(2, 1, 2, 3, 2))],
        {"size": (3, 2, 4)},
        symbolic={0: {0: "n", 3: "h"}},
        torch=_torch_resize((3, 2, 4), "trilinear"),
    )
    yield Sample(
        [rng.normal(size=(1, 3, 2, 2, 1))],
        {
            "size": (2, 3, 2),
            "layout": "NDHWC",
            "method": "nearest_neighbor",
            "coordinate_transformation_mode": "tf_half_pixel_for_nn",
            "rounding_method": "floor",
        },
        torch=lambda torch, x: _torch_resize((2, 3, 2), "nearest-exact")(
            torch, x.movedim(-1, 1)
        ).movedim(1, -1),
        note="nearest, channels last",
    )
    yield Sample(
        [rng.normal(size=(1, 1, 2, 3, 2))],
        {
            "size": (2, 2, 3),
            "roi": (0.1, -0.2, 0.9, 0.8, 1.1, 0.3),
            "coordinate_transformation_mode": "tf_crop_and_resize",
        },
        note="a region",
    )


@register_samples("relax.grad.resize2d_backward_data")
def resize2d_backward_data(rng: np.random.Generator) -> Iterator[Sample]:
    yield Sample(
        [rng.normal(size=(1, 2, 5, 3))],
        {"data_shape": (1, 2, 3, 4), "size": (5, 3), "method": "cubic"},
        note="cubic",
    )


@register_samples("relax.grad.resize3d_backward_data")
def resize3d_backward_data(rng: np.random.Generator) -> Iterator[Sample]:
    yield Sample(
        [rng.normal(size=(1, 1, 2, 3, 2))],
        {"data_shape": (1, 1, 3, 2, 1), "size": (2, 3, 2)},
    )


def _torch_resize(size: Sequence[int], mode: str, **settings: Any) -> Callable[..., Any]:
    return lambda torch, x: torch.nn.functional.interpolate(x, size, mode=mode, **settings)


@register_samples("relax.image.affine_grid")
def affine_grid(rng: np.random.Generator) -> Iterator[Sample]:
    yield Sample(
        [rng.normal(size=(2, 2, 3))],
        {"size": (2, 3)},
        symbolic={0: {0: "n"}},
        note="corners aligned",
    )
    yield Sample(
        [rng.normal(size=(2, 2, 3))],
        {"size": (1, 3), "align_corners": False},
        torch=_torch_affine_grid((1, 3)),
    )
    yield Sample(
        [rng.normal(size=(1, 3, 4))],
        {"size": (2, 1, 3), "align_corners": False},
        symbolic={0: {0: "n"}},
        torch=_torch_affine_grid((2, 1, 3)),
        note="three dimensions",
    )


@register_samples("relax.grad.affine_grid_backward_data")
def affine_grid_backward_data(rng: np.random.Generator) -> Iterator[Sample]:
    yield Sample([rng.normal(size=(2, 2, 1, 3))], {"align_corners": False}, symbolic={0: {0: "n"}})


def _torch_affine_grid(size: Sequence[int]) -> Callable[..., Any]:
    def forward(torch: Any, theta: Any) -> Any:
        shape = (len(theta), 1, *size)
        grid = torch.nn.functional.affine_grid(theta, shape, align_corners=False)
        return grid.movedim(-1, 1)

    return forward


@register_samples("relax.image.grid_sample")
def grid_sample(rng: np.random.Generator) -> Iterator[Sample]:
    def sample(
        note: str,
        method: str,
        padding_mode: str,
        align_corners: bool,
        shape: Sequence[int] = (2, 2, 3, 4),
        **settings: Any,
    ) -> Sample:
        ndim = len(shape) - 2
        attrs = {
            "method": method,
            "padding_mode": padding_mode,
            "align_corners": align_corners,
            "layout": "NCHW" if ndim == 2 else "NCDHW",
        }
        return Sample(
            [rng.normal(size=shape), _grid(rng, (shape[0], ndim, *(2, 1, 3)[-ndim:]), shape)],
            attrs,
            torch=_torch_grid_sample(method, padding_mode, align_corners),
            note=note,
            **settings,
        )

    yield sample(
        "zeros",
        "bilinear",
        "zeros",
        False,
        symbolic={0: {0: "n", 2: "h"}, 1: {0: "n", 3: "w"}},
    )
    yield sample("border", "bilinear", "border", True)
    yield sample("reflection", "bilinear", "reflection", False)
    yield sample("an extent of 1 reflected", "bilinear", "reflection", True, (1, 1, 1, 3))
    yield sample("nearest", "nearest", "reflection", True)
    yield sample("bicubic", "bicubic", "zeros", True, (1, 1, 3, 4))
    yield sample(
        "bicubic, reflection, which TVM is slow to compile",
        "bicubic",
        "reflection",
        False,
        (1, 1, 2, 3),
        order=1,
        dtypes=(),
    )
    yield sample("three dimensions", "bilinear", "border", False, (1, 2, 2, 3, 2))


@register_samples("relax.grad.grid_sample_jvp")
def grid_sample_jvp(rng: np.random.Generator) -> Iterator[Sample]:
    shape = (1, 2, 3, 4)
    yield Sample(
        [
            rng.normal(size=shape),
            _grid(rng, (1, 2, 1, 3), shape),
            (rng.normal(size=(1, 2, 1, 3)),),
        ],
    )


@register_samples("relax.grad.grid_sample_backward_data")
def grid_sample_backward_data(rng: np.random.Generator) -> Iterator[Sample]:
    shape = (1, 2, 3, 4)
    yield Sample(
        [
            rng.normal(size=(1, 2, 1, 3)),
            shape,
            _grid(rng, (1, 2, 1, 3), shape),
            (rng.normal(size=(1, 2, 1, 3)),),
        ],
    )


@register_samples("relax.grad.grid_sample_backward_grid")
def grid_sample_backward_grid(rng: np.random.Generator) -> Iterator[Sample]:
    shape = (1, 2, 3, 4)
    yield Sample(
        [
            rng.normal(size=(1, 2, 1, 3)),
            rng.normal(size=shape),
            _grid(rng, (1, 2, 1, 3), shape),
        ],
    )


def _grid(rng: np.random.Generator, shape: Sequence[int], data_shape: Sequence[int]) -> Any:
    """Return a grid that reaches outside the data, with every sampling point well inside a cell.

    Cells end at coordinates that are multiples of half an element, with either value of
    ``align_corners``.
    """
    extents = np.array(data_shape[:1:-1])
    grid = rng.uniform(-1.6, 1.6, shape)
    for index in np.ndindex(*shape):
        extent = extents[index[1]]
        while True:
            u = grid[index]
            cells = [(u + 1) * extent, (u + 1) * (extent - 1) if extent > 1 else 0.5]
            if all(0.2 < cell % 1 < 0.8 for cell in cells):
                break
            grid[index] = rng.uniform(-1.6, 1.6)
    return grid


def _torch_grid_sample(method: str, padding_mode: str, align_corners: bool) -> Callable[..., Any]:
    def forward(torch: Any, x: Any, grid: Any) -> Any:
        return torch.nn.functional.grid_sample(
            x, grid.movedim(1, -1), method, padding_mode, align_corners
        )

    return forward
