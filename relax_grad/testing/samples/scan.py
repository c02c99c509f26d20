"""Samples of scans."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ._sample import Sample, register_samples

_N = {0: {0: "n"}}


def _scans(rng: np.random.Generator, forward: Any, order: int) -> Iterator[Sample]:
    """Yield samples that cover every attribute; ``forward(torch, x, axis)`` is the inclusive scan
    along an axis."""
    for note, shape, attrs in (
        ("an axis", (2, 3), {"axis": 1}),
        ("a negative axis, exclusive", (3, 2, 2), {"axis": -2, "exclusive": True}),
        ("flattened", (2, 2), {}),
        ("flattened, exclusive", (2, 2), {"exclusive": True}),
        ("flattened 0-d", (), {}),
    ):

        def torch(torch: Any, x: Any, attrs: Any = attrs) -> Any:
            axis = attrs.get("axis")
            if axis is None:
                x, axis = x.reshape(-1), 0
            if not attrs.get("exclusive"):
                return forward(torch, x, axis)
            first = torch.full_like(x.narrow(axis, 0, 1), forward is _cumprod)
            return forward(
                torch, torch.cat([first, x.narrow(axis, 0, x.shape[axis] - 1)], axis), axis
            )

        yield Sample(
            [rng.normal(size=shape)],
            attrs,
            order=order,
            symbolic=_N if shape else None,
            torch=torch,
            note=note,
        )
    yield Sample(
        [rng.normal(size=(2, 3))],
        {"axis": 0, "dtype": "float64"},
        torch=lambda torch, x: forward(torch, x, 0),
        note="a wider result",
    )
    yield Sample(
        [rng.normal(size=(0, 2))],
        {"axis": 0},
        dtypes=(),
        symbolic=_N,
        order=1,
        note="an empty axis",
    )


def _cumsum(torch: Any, x: Any, axis: Any) -> Any:
    return x.cumsum(axis)


def _cumprod(torch: Any, x: Any, axis: Any) -> Any:
    return x.cumprod(axis)


@register_samples("relax.cumsum")
def cumsum(rng: np.random.Generator) -> Iterator[Sample]:
    yield from _scans(rng, _cumsum, order=2)


@register_samples("relax.cumprod")
def cumprod(rng: np.random.Generator) -> Iterator[Sample]:
    yield from _scans(rng, _cumprod, order=2)
    zeros = np.array([[2.0, 3.0, 0.5], [2.0, 0.0, 3.0], [0.0, 2.0, 0.0], [0.0, 0.0, 0.0]])
    for exclusive in (False, True):
        yield Sample(
            [zeros],
            {"axis": 1, "exclusive": exclusive},
            order=3,
            dtypes=(),
            symbolic=_N,
            torch=None if exclusive else lambda torch, x: x.cumprod(1),
            note="none, one, two and three zeros",
        )


@register_samples("relax.grad.cumsum_backward_data")
def cumsum_backward_data(rng: np.random.Generator) -> Iterator[Sample]:
    yield Sample([rng.normal(size=(2, 3)), (2, 3)], {"axis": -1}, note="an axis")
    yield Sample([rng.normal(size=(6,)), (2, 3)], {"exclusive": True}, note="flattened, exclusive")


def _linear_scans(rng: np.random.Generator) -> Iterator[Sample]:
    for note, shape, axis in (
        ("the last axis", (2, 3), -1),
        ("another axis", (3, 2), 0),
    ):
        yield Sample(
            [rng.normal(size=shape), rng.normal(size=shape)],
            {"axis": axis},
            order=3,
            symbolic={0: {0: "n"}, 1: {0: "n"}},
            note=note,
        )
    yield Sample([rng.normal(size=(2, 3))], {"axis": 1}, order=3, note="a product")


@register_samples("relax.grad.linear_scan")
def linear_scan(rng: np.random.Generator) -> Iterator[Sample]:
    yield from _linear_scans(rng)


@register_samples("relax.grad.linear_scan_reverse")
def linear_scan_reverse(rng: np.random.Generator) -> Iterator[Sample]:
    yield from _linear_scans(rng)
