"""Samples of the operators that join and split tensors."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from tvm import relax

from ._sample import Sample, register_samples

_N = {0: {0: "n"}}


@register_samples("relax.concat")
def concat(rng: np.random.Generator) -> Iterator[Sample]:
    for note, shapes, axis, symbolic in (
        ("two tensors", ((2, 3), (4, 3)), 0, None),
        ("a negative axis", ((2, 3), (2, 1), (2, 2)), -1, None),
        ("a single tensor", ((2, 3),), 1, None),
        ("an empty tensor", ((2, 3), (0, 3), (1, 3)), 0, None),
        ("no axis", ((2,), (3,)), None, None),
        ("a single tensor and no axis", ((2,),), None, None),
    ):
        yield Sample(
            [tuple(rng.normal(size=shape) for shape in shapes)],
            {"axis": axis},
            symbolic=symbolic,
            torch=lambda torch, tensors, axis=axis: torch.cat(tensors, axis or 0),
            note=note,
        )

    def through_parameters(a: relax.Expr, b: relax.Expr, axis: int) -> relax.Expr:
        return relax.op.concat([a, b, a], axis)

    yield Sample(
        [rng.normal(size=(2, 3)), rng.normal(size=(3, 3))],
        {"axis": 0},
        function=through_parameters,
        symbolic={0: {0: "n"}, 1: {0: "m"}},
        torch=lambda torch, a, b: torch.cat([a, b, a]),
        note="a tensor twice, symbolic along the axis",
    )
    yield Sample(
        [rng.normal(size=(2, 3)), rng.normal(size=(2, 1))],
        {"axis": -1},
        function=through_parameters,
        symbolic={0: {0: "n"}, 1: {0: "n"}},
        torch=lambda torch, a, b: torch.cat([a, b, a], -1),
        note="symbolic, but not along the axis",
    )


@register_samples("relax.split")
def split(rng: np.random.Generator) -> Iterator[Sample]:
    for note, shape, parts, axis, symbolic, torch in (
        ("equal parts", (4, 3), 2, 0, None, lambda torch, x: x.tensor_split(2)),
        ("the last part smaller", (5, 3), 2, 0, None, lambda torch, x: x.split(3)),
        ("indices", (2, 5), [1, 3], -1, None, lambda torch, x: x.tensor_split([1, 3], -1)),
        ("into one", (2, 3), 1, 0, _N, lambda torch, x: x),
        ("no indices", (2, 3), [], 0, _N, lambda torch, x: x),
        ("an empty tensor", (0, 3), 2, 0, None, lambda torch, x: x.tensor_split(2)),
        ("empty parts", (4,), [0, 2, 2], 0, None, lambda torch, x: x.tensor_split([0, 2, 2])),
        (
            "indices beyond the end",
            (3, 2),
            [2, 7],
            0,
            None,
            lambda torch, x: x.tensor_split([2, 7]),
        ),
        ("parts that overlap", (4, 2), [3, 1], 0, None, lambda torch, x: (x[:3], x[3:3], x[1:])),
    ):
        yield Sample(
            [rng.normal(size=shape)],
            {"indices_or_sections": parts, "axis": axis},
            symbolic=symbolic,
            torch=torch,
            note=note,
        )
    yield Sample(
        [rng.normal(size=(2, 5))],
        {"indices_or_sections": [1, 3], "axis": 1},
        symbolic=_N,
        tvm_order=1,
        note="indices, symbolic along another axis",
    )
    for note, parts, torch in (
        ("an index, symbolic along the axis", [3], lambda torch, x: x.tensor_split([3])),
        ("an index beyond the end", [7], lambda torch, x: x.tensor_split([7])),
        ("sections, symbolic along the axis", 2, lambda torch, x: x.split(3)),
    ):
        yield Sample(
            [rng.normal(size=(5, 2))],
            {"indices_or_sections": parts},
            symbolic=_N,
            tvm_order=1,
            torch=torch,
            note=note,
        )


@register_samples("relax.stack")
def stack(rng: np.random.Generator) -> Iterator[Sample]:
    for note, shape, count, axis in (
        ("the first axis", (2, 3), 3, 0),
        ("a negative axis", (2, 3), 2, -1),
        ("an axis between", (2, 3), 2, -2),
        ("a single tensor", (2,), 1, 1),
        ("0-d", (), 2, 0),
        ("empty", (2, 0), 2, 1),
        ("a single empty tensor", (0,), 1, 0),
    ):
        yield Sample(
            [tuple(rng.normal(size=shape) for _ in range(count))],
            {"axis": axis},
            torch=lambda torch, tensors, axis=axis: torch.stack(tensors, axis),
            note=note,
        )
    yield Sample(
        [rng.normal(size=(2, 3)), rng.normal(size=(2, 3))],
        {"axis": 1},
        function=lambda a, b, axis: relax.op.stack([a, b, a], axis),
        symbolic={0: {0: "n"}, 1: {0: "n"}},
        torch=lambda torch, a, b: torch.stack([a, b, a], 1),
        note="a tensor twice, symbolic",
    )


@register_samples("relax.meshgrid")
def meshgrid(rng: np.random.Generator) -> Iterator[Sample]:
    for note, sizes, indexing in (
        ("two vectors", (2, 3), "ij"),
        ("three vectors", (2, 1, 3), "ij"),
        ("Cartesian", (2, 3, 2), "xy"),
        ("a single vector", (3,), "ij"),
        ("a single vector, Cartesian", (2,), "xy"),
        ("an empty vector", (2, 0), "ij"),
    ):
        yield Sample(
            [tuple(rng.normal(size=(size,)) for size in sizes)],
            {"indexing": indexing},
            torch=lambda torch, vectors, indexing=indexing: torch.meshgrid(
                *vectors, indexing=indexing
            ),
            note=note,
        )
    yield Sample(
        [rng.normal(size=(2,)), rng.normal(size=(3,))],
        {"indexing": "xy"},
        function=lambda a, b, indexing: relax.op.meshgrid([a, b], indexing),
        symbolic={0: {0: "n"}, 1: {0: "m"}},
        tvm_order=1,
        torch=lambda torch, a, b: torch.meshgrid(a, b, indexing="xy"),
        note="symbolic",
    )


@register_samples("relax.grad.concat_backward_tensors")
def concat_backward_tensors(rng: np.random.Generator) -> Iterator[Sample]:
    yield Sample([rng.normal(size=(3, 3)), [(2, 3), (0, 3), (1, 3)]], {"axis": 0})


@register_samples("relax.grad.split_backward_x")
def split_backward_x(rng: np.random.Generator) -> Iterator[Sample]:
    for note, shapes, parts in (
        ("parts that overlap", ((3, 2), (0, 2), (4, 2)), [3, 1]),
        ("sections", ((3, 2), (2, 2)), 2),
    ):
        yield Sample(
            [tuple(rng.normal(size=shape) for shape in shapes), relax.ShapeExpr([5, 2])],
            {"indices_or_sections": parts, "axis": 0},
            note=note,
        )


@register_samples("relax.grad.stack_backward_tensors")
def stack_backward_tensors(rng: np.random.Generator) -> Iterator[Sample]:
    for shape, axis, tvm_order in (((2, 3), -1, 1), ((2, 1), 1, None)):
        yield Sample([rng.normal(size=shape)], {"axis": axis}, symbolic=_N, tvm_order=tvm_order)
    yield Sample([rng.normal(size=(2, 3))], {"axis": -1})
