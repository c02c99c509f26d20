"""Samples of the operators that repeat, reshape or broadcast tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from tvm import relax

from ._sample import Sample, register_samples

_N = {0: {0: "n"}}


@register_samples("relax.tile")
def tile(rng: np.random.Generator) -> Iterator[Sample]:
    for note, shape, repeats in (
        ("as many repeats as axes", (2, 3), (2, 3)),
        ("fewer repeats than axes", (2, 3, 2), (3,)),
        ("more repeats than axes, one of them 1", (2, 3), (2, 1, 3, 1)),
        ("every repeat 1", (2, 3), (1, 1, 1)),
        ("no repeats", (2, 3), ()),
        ("0-d", (), (2, 3)),
        ("0-d and no repeats", (), ()),
        ("repeats of 0", (2, 3), (2, 0)),
        ("an empty axis", (2, 0), (2, 3)),
    ):
        yield Sample(
            [rng.normal(size=shape)],
            {"repeats": list(repeats)},
            symbolic=_N if shape else None,
            torch=lambda torch, x, repeats=repeats: torch.tile(x, repeats),
            note=note,
        )


@register_samples("relax.repeat")
def repeat(rng: np.random.Generator) -> Iterator[Sample]:
    for note, shape, repeats, axis in (
        ("the first axis", (2, 3), 3, 0),
        ("a negative axis", (2, 3, 2), 2, -2),
        ("flattened", (2, 3), 2, None),
        ("once", (2, 3), 1, 1),
        ("0-d", (), 3, None),
        ("repeats of 0", (2, 3), 0, 1),
        ("repeats of 0, flattened", (2, 3), 0, None),
        ("an empty axis, flattened", (2, 0), 2, None),
        ("an empty axis", (2, 0), 2, 0),
    ):
        yield Sample(
            [rng.normal(size=shape)],
            {"repeats": repeats, "axis": axis},
            symbolic=_N if shape else None,
            torch=lambda torch, x, repeats=repeats, axis=axis: torch.repeat_interleave(
                x, repeats, axis
            ),
            note=note,
        )


@register_samples("relax.squeeze")
def squeeze(rng: np.random.Generator) -> Iterator[Sample]:
    for note, shape, axis, symbolic in (
        ("every axis of extent 1", (1, 3, 1), None, None),
        ("no axis of extent 1", (2, 3), None, None),
        ("one axis", (2, 1, 3), [1], _N),
        ("negative axes, not in order", (2, 1, 3, 1), [-1, 1], _N),
        ("an axis whose extent is not 1", (2, 1, 3), [0, 1], None),
        ("a symbolic axis", (1, 3), [0], _N),
        ("no axes", (1, 3), [], _N),
        ("to 0-d", (1, 1), None, None),
        ("0-d", (), None, None),
        ("empty", (1, 0), [0], None),
    ):
        torch = None
        if axis != []:
            dims = tuple(range(len(shape))) if axis is None else tuple(axis)

            def torch(torch: Any, x: Any, dims: Any = dims) -> Any:
                return torch.squeeze(x, dims)

        yield Sample(
            [rng.normal(size=shape)], {"axis": axis}, symbolic=symbolic, torch=torch, note=note
        )


@register_samples("relax.expand_dims")
def expand_dims(rng: np.random.Generator) -> Iterator[Sample]:
    for note, shape, axis, out_shape in (
        ("one axis", (2, 3), [1], (2, 1, 3)),
        ("negative axes, not in order", (2, 3), [-1, 0], (1, 2, 3, 1)),
        ("no axes", (2, 3), [], (2, 3)),
        ("0-d", (), [0, -1], (1, 1)),
        ("empty", (2, 0), [1], (2, 1, 0)),
    ):
        yield Sample(
            [rng.normal(size=shape)],
            {"axis": axis},
            symbolic=_N if shape else None,
            torch=lambda torch, x, out_shape=out_shape: x.reshape(out_shape),
            note=note,
        )


@register_samples("relax.flatten")
def flatten(rng: np.random.Generator) -> Iterator[Sample]:
    for note, shape in (
        ("plain", (2, 3, 2)),
        ("1-d", (3,)),
        ("0-d", ()),
        ("empty", (3, 0)),
        ("empty at the front", (0, 3)),
    ):
        yield Sample(
            [rng.normal(size=shape)],
            symbolic=_N if shape else None,
            torch=lambda torch, x: torch.flatten(x),
            note=note,
        )


@register_samples("relax.reshape")
def reshape(rng: np.random.Generator) -> Iterator[Sample]:
    for note, shape, new_shape, out_shape in (
        ("plain", (2, 6), (3, 4), (3, 4)),
        ("-1", (2, 3, 4), (-1, 2), (12, 2)),
        ("0 copies the extent", (2, 3, 4), (0, -1), (2, 12)),
        ("to 0-d", (1, 1), (), ()),
        ("from 0-d", (), (1, 1), (1, 1)),
        ("from an empty axis", (3, 0), (-1,), (0,)),
        ("from an empty axis to a higher rank", (0,), (0, 1, 2), (0, 1, 2)),
    ):
        yield Sample(
            [rng.normal(size=shape), list(new_shape)],
            torch=lambda torch, x, out_shape=out_shape: x.reshape(out_shape),
            note=note,
        )


@register_samples("relax.broadcast_to")
def broadcast_to(rng: np.random.Generator) -> Iterator[Sample]:
    for note, shape, new_shape in (
        ("an axis of extent 1", (2, 1), (2, 3)),
        ("more axes", (3,), (2, 3)),
        ("both", (2, 1, 3), (2, 2, 4, 3)),
        ("axes of extent 1 that stay", (1, 3), (2, 1, 3)),
        ("the same shape", (2, 3), (2, 3)),
        ("0-d", (), (2, 3)),
        ("0-d to 0-d", (), ()),
        ("to an empty axis", (1, 3), (0, 3)),
        ("more axes, one of them empty", (3,), (2, 0, 3)),
        ("from an empty axis", (0, 1), (0, 3)),
    ):
        yield Sample(
            [rng.normal(size=shape), list(new_shape)],
            torch=lambda torch, x, new_shape=new_shape: torch.broadcast_to(x, new_shape),
            note=note,
        )


@register_samples("relax.collapse_sum_to")
def collapse_sum_to(rng: np.random.Generator) -> Iterator[Sample]:
    for note, shape, new_shape, symbolic in (
        ("to an axis of extent 1", (2, 3), (2, 1), None),
        ("a symbolic axis", (2, 3), (1, 3), _N),
        ("fewer axes", (2, 3, 4), (4,), _N),
        ("both", (2, 2, 4, 3), (2, 1, 3), _N),
        ("axes of extent 1 that stay", (2, 1, 3), (1, 3), _N),
        ("to 0-d", (2, 3), (), _N),
        ("the same shape", (2, 3), (2, 3), None),
        ("over an empty axis", (0, 3), (1, 3), None),
    ):
        yield Sample(
            [rng.normal(size=shape), relax.ShapeExpr(list(new_shape))],
            symbolic=symbolic,
            torch=lambda torch, x, new_shape=new_shape: x.sum_to_size(new_shape),
            note=note,
        )


@register_samples("relax.collapse_sum_like")
def collapse_sum_like(rng: np.random.Generator) -> Iterator[Sample]:
    for note, shape, like, symbolic in (
        ("to an axis of extent 1", (2, 3), (2, 1), {0: {0: "n"}, 1: {0: "n"}}),
        ("fewer axes", (2, 3, 4), (4,), _N),
        ("over an empty axis", (0, 3), (1, 3), None),
    ):
        yield Sample(
            [rng.normal(size=shape), rng.normal(size=like)],
            wrt=[0],
            symbolic=symbolic,
            torch=lambda torch, x, like: x.sum_to_size(like.shape),
            note=note,
        )


@register_samples("relax.nn.batch_flatten")
def batch_flatten(rng: np.random.Generator) -> Iterator[Sample]:
    for note, shape, symbolic in (
        ("images", (2, 2, 1, 3), {0: {0: "n", 3: "w"}}),
        ("2-d", (2, 3), _N),
        ("empty", (2, 0, 3), None),
        ("an empty batch", (0, 2, 3), None),
    ):
        yield Sample(
            [rng.normal(size=shape)],
            symbolic=symbolic,
            torch=lambda torch, x: torch.flatten(x, 1) if x.ndim > 2 else x,
            note=note,
        )


@register_samples("relax.grad.tile_backward_data")
def tile_backward_data(rng: np.random.Generator) -> Iterator[Sample]:
    yield Sample([rng.normal(size=(2, 4, 3)), (2, 3)], {"repeats": [2, 2, 1]})


@register_samples("relax.grad.repeat_backward_data")
def repeat_backward_data(rng: np.random.Generator) -> Iterator[Sample]:
    yield Sample([rng.normal(size=(2, 6)), (2, 3)], {"repeats": 2, "axis": -1})
