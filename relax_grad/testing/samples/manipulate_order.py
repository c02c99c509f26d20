"""Samples of the operators that reorder elements or drop some of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from tvm import tirx

from ._sample import Sample, register_samples

_N = {0: {0: "n"}}


@register_samples("relax.permute_dims")
def permute_dims(rng: np.random.Generator) -> Iterator[Sample]:
    for note, shape, axes in (
        ("all axes", (2, 3, 4), [2, 0, 1]),
        ("negative axes", (2, 3, 4), [-2, -1, 0]),
        ("reversed", (2, 3, 4), None),
        ("0-d", (), None),
        ("empty", (2, 0), [1, 0]),
    ):
        order = list(reversed(range(len(shape)))) if axes is None else axes
        yield Sample(
            [rng.normal(size=shape)],
            {"axes": axes},
            symbolic=_N if shape else None,
            torch=lambda torch, x, order=order: torch.permute(x, order),
            note=note,
        )


@register_samples("relax.flip")
def flip(rng: np.random.Generator) -> Iterator[Sample]:
    for note, shape, axis in (
        ("the first axis", (3, 2), 0),
        ("a negative axis", (2, 3), -1),
        ("an axis of extent 1", (2, 1), 1),
        ("empty", (2, 0), 1),
    ):
        yield Sample(
            [rng.normal(size=shape)],
            {"axis": axis},
            symbolic=_N,
            torch=lambda torch, x, axis=axis: torch.flip(x, [axis]),
            note=note,
        )


@register_samples("relax.reverse_sequence")
def reverse_sequence(rng: np.random.Generator) -> Iterator[Sample]:
    for note, shape, lengths, seq_axis, batch_axis, symbolic in (
        ("every kind of length", (5, 4), [0, 1, 3, 4, 9], 1, 0, {0: {0: "n", 1: "t"}, 1: {0: "n"}}),
        ("negative axes", (3, 2, 2), [2, 3], -3, -2, {0: {1: "n", 2: "m"}, 1: {0: "n"}}),
        ("a negative length", (2, 3), [-2, 2], 1, 0, {0: {1: "t"}}),
        ("empty", (2, 0), [0, 1], 1, 0, None),
    ):
        for dtype in ("int64", "int32")[: 1 + (note == "negative axes")]:

            def torch(
                torch: Any,
                x: Any,
                lengths: Any,
                seq_axis: Any = seq_axis,
                batch_axis: Any = batch_axis,
            ) -> Any:
                x = x.movedim((batch_axis, seq_axis), (0, 1))
                place = torch.arange(x.shape[1])
                length = lengths.clamp(max=x.shape[1])[:, None]
                source = torch.where(place < length, length - 1 - place, place)
                batch = torch.arange(x.shape[0])[:, None]
                return x[batch, source].movedim((0, 1), (batch_axis, seq_axis))

            yield Sample(
                [rng.normal(size=shape), np.array(lengths, dtype)],
                {"seq_axis": seq_axis, "batch_axis": batch_axis},
                symbolic=symbolic,
                torch=torch,
                note=f"{note}, {dtype}",
            )


@register_samples("relax.layout_transform")
def layout_transform(rng: np.random.Generator) -> Iterator[Sample]:
    for note, shape, index_map, pad_value, symbolic, torch in (
        ("transposed", (2, 3), lambda i, j: (j, i), None, _N, lambda torch, x: x.T),
        (
            "packed channels",
            (1, 4, 2),
            lambda n, c, w: (n, c // 2, w, c % 2),
            None,
            {0: {0: "n", 2: "w"}},
            lambda torch, x: x.reshape(1, 2, 2, 2).permute(0, 1, 3, 2),
        ),
        (
            "padded",
            (5, 2),
            lambda i, j: (j, i // 4, i % 4),
            1.5,
            {0: {1: "m"}},
            lambda torch, x: torch.nn.functional.pad(x.T, (0, 3), value=1.5).reshape(2, 2, 4),
        ),
        (
            "padded with any value, symbolic along the axis",
            (5,),
            lambda i: (i // 2, i % 2),
            None,
            _N,
            None,
        ),
        (
            "flattened",
            (2, 3),
            lambda i, j: (i * 3 + j,),
            None,
            _N,
            lambda torch, x: x.flatten(),
        ),
        (
            "an axis more",
            (3,),
            lambda i: (i, tirx.const(0, "int64")),
            None,
            _N,
            lambda torch, x: x[:, None],
        ),
        ("empty", (2, 0), lambda i, j: (j, i), None, None, lambda torch, x: x.T),
    ):
        yield Sample(
            [rng.normal(size=shape)],
            {"index_map": index_map, "pad_value": pad_value},
            symbolic=symbolic,
            torch=torch,
            note=note,
        )


@register_samples("relax.nn.pixel_shuffle")
def pixel_shuffle(rng: np.random.Generator) -> Iterator[Sample]:
    for note, shape, factor, symbolic in (
        ("images", (2, 8, 1, 3), 2, {0: {0: "n", 2: "h", 3: "w"}}),
        ("no batch", (9, 2, 1), 3, {0: {1: "h"}}),
        ("two batch axes", (1, 2, 4, 2, 1), 2, _N),
        ("a factor of 1", (1, 2, 2, 2), 1, _N),
        ("an empty batch", (0, 4, 2, 2), 2, None),
        ("a symbolic number of channels", (1, 8, 1, 2), 2, {0: {1: "c"}}),
    ):
        yield Sample(
            [rng.normal(size=shape)],
            {"upscale_factor": factor},
            symbolic=symbolic,
            # PyTorch's gradient for an empty batch has the wrong shape.
            torch=None
            if 0 in shape
            else lambda torch, x, factor=factor: torch.pixel_shuffle(x, factor),
            note=note,
        )


_DIAGONALS = (
    ("the main diagonal", (3, 3), 0),
    ("above, wide", (2, 4), 1),
    ("below, tall, in a batch", (2, 4, 2), -1),
    ("beyond", (2, 3), 5),
    ("beyond on the other side", (2, 3), -5),
    ("empty", (0, 3), 0),
)


@register_samples("relax.tril")
def tril(rng: np.random.Generator) -> Iterator[Sample]:
    yield from _triangles(rng, lambda torch, x, k: torch.tril(x, k))


@register_samples("relax.triu")
def triu(rng: np.random.Generator) -> Iterator[Sample]:
    yield from _triangles(rng, lambda torch, x, k: torch.triu(x, k))


def _triangles(rng: np.random.Generator, forward: Any) -> Iterator[Sample]:
    for note, shape, k in _DIAGONALS:
        yield Sample(
            [rng.normal(size=shape)],
            {"k": k},
            symbolic=_N,
            torch=lambda torch, x, k=k: forward(torch, x, k),
            note=note,
        )


@register_samples("relax.grad.layout_transform_backward_x")
def layout_transform_backward_x(rng: np.random.Generator) -> Iterator[Sample]:
    yield Sample([rng.normal(size=(2, 2)), (3,)], {"index_map": lambda i: (i // 2, i % 2)})


@register_samples("relax.grad.pixel_shuffle_backward_data")
def pixel_shuffle_backward_data(rng: np.random.Generator) -> Iterator[Sample]:
    yield Sample([rng.normal(size=(2, 4, 2)), (8, 2, 1)], {"upscale_factor": 2})
