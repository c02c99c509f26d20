"""Samples of reductions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ._sample import Sample, register_samples

_N = {0: {0: "n"}}
_REDUCTIONS: tuple[tuple[str, tuple[int, ...], list[int] | None, bool], ...] = (
    ("every axis", (2, 3), None, False),
    ("every axis, kept", (2, 3), None, True),
    ("negative axes, not in order", (2, 3, 2), [-1, 0], False),
    ("negative axis, kept", (2, 3), [-1], True),
    ("an axis of extent 1", (2, 1), [1], False),
    ("no axes", (2, 3), [], False),
    ("no axes, kept", (2, 3), [], True),
    ("0-d", (), None, False),
    ("another axis empty", (3, 0), [0], False),
)


#: Fewer cases, which still cover every attribute.
_FEW = _REDUCTIONS[::2]


@register_samples("relax.sum")
def sum(rng: np.random.Generator) -> Iterator[Sample]:
    yield from _reductions(rng, lambda torch, x, axis, keep: x.sum(axis, keepdim=keep))
    yield Sample(
        [np.zeros((0, 3))],
        {"axis": [0]},
        torch=lambda torch, x: x.sum(0),
        note="over an empty axis",
    )


@register_samples("relax.mean")
def mean(rng: np.random.Generator) -> Iterator[Sample]:
    yield from _reductions(rng, lambda torch, x, axis, keep: x.mean(axis, keepdim=keep))


@register_samples("relax.variance")
def variance(rng: np.random.Generator) -> Iterator[Sample]:
    def forward(torch: Any, x: Any, axis: Any, keep: Any) -> Any:
        return x.var(axis, correction=0, keepdim=keep)

    yield from _reductions(rng, forward, _FEW)
    yield Sample(
        [rng.normal(size=(2, 4)) + 300],
        {"axis": [1]},
        torch=lambda torch, x: x.var(1, correction=0),
        dtypes=("float32",),
        note="a mean far from 0",
    )


@register_samples("relax.std")
def std(rng: np.random.Generator) -> Iterator[Sample]:
    def forward(torch: Any, x: Any, axis: Any, keep: Any) -> Any:
        return x.std(axis, correction=0, keepdim=keep)

    cases = [case for case in _FEW if "extent 1" not in case[0] and case[1] and case[2] != []]
    yield from _reductions(rng, forward, cases)
    yield Sample(
        [rng.normal(size=(2, 4)) + 300],
        {"axis": [1]},
        torch=lambda torch, x: x.std(1, correction=0),
        dtypes=("float32",),
        note="a mean far from 0",
    )
    yield Sample(
        [np.stack([np.full(3, 0.3), np.arange(3.0)])],
        {"axis": [1]},
        torch=lambda torch, x: x.std(1, correction=0),
        smooth=False,
        note="a row of equal elements",
    )


@register_samples("relax.max")
def max(rng: np.random.Generator) -> Iterator[Sample]:
    yield from _extrema(rng, lambda torch, x, axis, keep: x.amax(axis, keepdim=keep))


@register_samples("relax.min")
def min(rng: np.random.Generator) -> Iterator[Sample]:
    # min shares the rule of max.
    yield from _extrema(rng, lambda torch, x, axis, keep: x.amin(axis, keepdim=keep), _FEW[1:2])


def _extrema(rng: np.random.Generator, forward: Any, cases: Any = _FEW) -> Iterator[Sample]:
    yield from _reductions(rng, forward, cases)
    ties = np.array([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    for axis in ([1], [0, 1]):
        yield Sample(
            [ties],
            {"axis": axis},
            torch=lambda torch, x, axis=axis: forward(torch, x, tuple(axis), False),
            smooth=False,
            note="ties",
        )


@register_samples("relax.prod")
def prod(rng: np.random.Generator) -> Iterator[Sample]:
    def forward(torch: Any, x: Any, axis: Any, keep: Any) -> Any:
        for a in sorted((a % x.ndim for a in axis), reverse=True):
            x = x.prod(a, keepdim=keep)
        return x

    yield from _reductions(rng, forward, _FEW)
    zeros = np.array([[2.0, 3.0, 0.5], [2.0, 0.0, 3.0], [0.0, 2.0, 0.0], [0.0, 0.0, 0.0]])
    for note, axis, keepdims in (
        ("none, one, two and three zeros", [1], True),
        ("two axes with zeros", [0, 1], False),
    ):
        yield Sample(
            [zeros if axis == [1] else zeros[:2]],
            {"axis": axis, "keepdims": keepdims},
            order=3,
            dtypes=(),
            torch=lambda torch, x, axis=axis, keep=keepdims: forward(torch, x, axis, keep),
            note=note,
        )
    yield Sample(
        [np.zeros((0, 2))],
        {"axis": [0]},
        torch=lambda torch, x: x.prod(0),
        note="over an empty axis",
    )


@register_samples("relax.median")
def median(rng: np.random.Generator) -> Iterator[Sample]:
    for note, shape, axis, keepdims in (
        ("an even number of elements", (2, 4), [1], False),
        ("a negative axis, kept", (3, 2), [-2], True),
        ("every axis", (2, 3), None, False),
        ("two axes, kept", (2, 3, 2), [-1, 0], True),
        ("0-d, kept", (), None, True),
        ("another axis empty", (3, 0), [0], False),
    ):

        def torch(torch: Any, x: Any, axis: Any = axis, keepdims: Any = keepdims) -> Any:
            axes = range(x.ndim) if axis is None else [a % x.ndim for a in axis]
            kept = [a for a in range(x.ndim) if a not in axes]
            rows = x.permute((*kept, *axes)).reshape(
                *(x.shape[a] for a in kept), -1 if x.numel() else 3
            )
            value = rows.median(-1).values
            for a in sorted(axes) if keepdims else ():
                value = value.unsqueeze(a)
            return value

        yield Sample(
            [rng.normal(size=shape)],
            {"axis": axis, "keepdims": keepdims},
            symbolic=_N if shape else None,
            tvm_order=1 if axis == [1] else None,
            torch=torch,
            note=note,
        )
    yield Sample([rng.normal(size=(2, 3))], {"axis": [1]}, note="to second order by TVM's pass")
    yield Sample([rng.normal(size=(2, 3))], {"axis": []}, dtypes=(), note="no axes")
    yield Sample(
        [np.array([[1.0, 2.0, 1.0], [1.0, 0.0, 3.0]])],
        torch=lambda torch, x: x.median(),
        smooth=False,
        note="ties over every axis",
    )


@register_samples("relax.grad.mean_backward_x")
def mean_backward_x(rng: np.random.Generator) -> Iterator[Sample]:
    for note, shape, axis, keepdims in (
        ("a negative axis", (2,), [-1], False),
        ("every axis, kept", (1, 1), None, True),
    ):
        yield Sample(
            [rng.normal(size=shape), (2, 3)], {"axis": axis, "keepdims": keepdims}, note=note
        )


def _reductions(
    rng: np.random.Generator, forward: Any, cases: Any = _REDUCTIONS
) -> Iterator[Sample]:
    for note, shape, axis, keepdims in cases:
        # An empty list of axes means all axes in PyTorch, but no axes in TVM.
        def torch(torch: Any, x: Any, axis: Any = axis, keepdims: Any = keepdims) -> Any:
            if axis == []:
                return forward(torch, x.unsqueeze(0), (0,), False)
            return forward(torch, x, tuple(axis or range(x.ndim)), keepdims)

        yield Sample(
            [rng.normal(size=shape)],
            {"axis": axis, "keepdims": keepdims},
            symbolic=_N if shape else None,
            torch=torch,
            note=note,
        )
