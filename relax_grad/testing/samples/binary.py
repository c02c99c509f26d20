"""Samples of element-wise functions of two or more arguments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ._sample import Sample, register_samples

_BOTH = {0: {0: "n"}, 1: {0: "n"}}

#: A note on the special case, the two shapes, and the axes that can be symbolic.
_SHAPES = (
    ("one shape", (2, 3), (2, 3), _BOTH),
    ("x1 of extent 1", (2, 1), (2, 3), _BOTH),
    ("x2 of lower rank", (2, 3), (3,), {0: {0: "n"}}),
    ("each along another axis", (2, 1, 1), (3, 1), {0: {0: "n"}, 1: {0: "m"}}),
    ("x2 0-d", (2, 3), (), {0: {0: "n"}}),
    ("empty", (0, 3), (1, 3), None),
)
_FEW = _SHAPES[2:4]  # for the functions that differ from multiply only in their derivatives


def _samples(
    rng: np.random.Generator, torch: Any, values: Any, shapes: Any = _FEW
) -> Iterator[Sample]:
    for note, shape1, shape2, symbolic in shapes:
        yield Sample(
            [values(rng, shape1), values(rng, shape2)],
            symbolic=symbolic,
            torch=torch,
            note=note,
        )


def _normal(rng: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
    return np.asarray(rng.normal(size=shape))


def _away_from_zero(rng: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
    return np.asarray(rng.choice([-1, 1], size=shape) * rng.uniform(0.5, 2, size=shape))


def _positive(rng: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
    return np.asarray(rng.uniform(0.5, 2, size=shape))


def _kink(x1: Any, x2: Any, torch: Any, note: str) -> Sample:
    """Return a sample at kinks, where the only reference is PyTorch."""
    return Sample([np.array(x1), np.array(x2)], torch=torch, smooth=False, note=note)


@register_samples("relax.add")
def add(rng: np.random.Generator) -> Iterator[Sample]:
    yield from _samples(rng, lambda torch, x1, x2: x1 + x2, _normal)


@register_samples("relax.subtract")
def subtract(rng: np.random.Generator) -> Iterator[Sample]:
    yield from _samples(rng, lambda torch, x1, x2: x1 - x2, _normal)


@register_samples("relax.multiply")
def multiply(rng: np.random.Generator) -> Iterator[Sample]:
    yield from _samples(rng, lambda torch, x1, x2: x1 * x2, _normal, _SHAPES)


@register_samples("relax.divide")
def divide(rng: np.random.Generator) -> Iterator[Sample]:
    yield from _samples(rng, lambda torch, x1, x2: x1 / x2, _away_from_zero)


@register_samples("relax.power")
def power(rng: np.random.Generator) -> Iterator[Sample]:
    def torch(torch: Any, x1: Any, x2: Any) -> Any:
        return torch.pow(x1, x2)

    yield from _samples(rng, torch, _positive)
    yield Sample(
        [_away_from_zero(rng, (4,)), np.array([2.0, 3.0, 0.0, -1.0])],
        wrt=[0],
        torch=torch,
        note="negative base",
    )
    yield _kink(
        [0.0, 0.0, 0.0, 0.0, 0.0, -2.0, 2.0],
        [0.0, 1.0, 2.0, 0.5, -0.0, 0.0, 0.0],
        torch,
        "a base of 0, an exponent of 0",
    )


@register_samples("relax.maximum")
def maximum(rng: np.random.Generator) -> Iterator[Sample]:
    yield from _extremum(rng, lambda torch, x1, x2: torch.maximum(x1, x2))


@register_samples("relax.minimum")
def minimum(rng: np.random.Generator) -> Iterator[Sample]:
    yield from _extremum(rng, lambda torch, x1, x2: torch.minimum(x1, x2))


def _extremum(rng: np.random.Generator, torch: Any) -> Iterator[Sample]:
    yield from _samples(rng, torch, _normal)
    yield _kink([1.0, 2.0, -0.0, np.inf], [1.0, 3.0, 0.0, np.inf], torch, "equal arguments")


@register_samples("relax.atan2")
def atan2(rng: np.random.Generator) -> Iterator[Sample]:
    def torch(torch: Any, x1: Any, x2: Any) -> Any:
        return torch.atan2(x1, x2)

    yield from _samples(rng, torch, _away_from_zero)
    yield _kink([0.0, 0.0, -0.0, 1.0], [0.0, 2.0, -0.0, 0.0], torch, "at the origin")


@register_samples("relax.log_add_exp")
def log_add_exp(rng: np.random.Generator) -> Iterator[Sample]:
    def torch(torch: Any, x1: Any, x2: Any) -> Any:
        return torch.logaddexp(x1, x2)

    yield from _samples(rng, torch, _normal)
    yield Sample(
        [np.array([80.0, -90.0, 5.0]), np.array([80.0, -20.0, -90.0])],
        torch=torch,
        dtypes=("float32",),
        note="large arguments",
    )
    yield _kink([-np.inf, np.inf, 0.0], [1.0, 1.0, -np.inf], torch, "infinite arguments")


@register_samples("relax.mod")
def mod(rng: np.random.Generator) -> Iterator[Sample]:
    yield from _remainder(rng, lambda torch, x1, x2: torch.fmod(x1, x2))
    yield Sample(
        [np.array([1.0, -2.5]), np.array([np.inf, -np.inf])],
        torch=lambda torch, x1, x2: torch.fmod(x1, x2),
        smooth=False,
        note="infinite divisors",
    )


@register_samples("relax.floor_mod")
def floor_mod(rng: np.random.Generator) -> Iterator[Sample]:
    yield from _remainder(rng, lambda torch, x1, x2: torch.remainder(x1, x2))


def _remainder(rng: np.random.Generator, torch: Any) -> Iterator[Sample]:
    """Yield samples away from the jumps, which rounding to half precision could cross."""
    for note, shape1, shape2, symbolic in _FEW:
        divisor = np.full(shape2, 2.0)
        quotient = rng.integers(-3, 3, size=shape1) + rng.uniform(0.3, 0.7, size=shape1)
        yield Sample([2 * quotient, divisor], symbolic=symbolic, torch=torch, note=note)
    yield Sample(
        [np.array([4.9, 4.9, -4.9, -4.9]), np.array([2.0, -2.0, 2.0, -2.0])],
        torch=torch,
        note="every sign",
    )


@register_samples("relax.ewise_fma")
def ewise_fma(rng: np.random.Generator) -> Iterator[Sample]:
    for note, shape in (("plain", (2, 3)), ("0-d", ()), ("empty", (0, 3))):
        yield Sample(
            [_normal(rng, shape) for _ in range(3)],
            symbolic={i: {0: "n"} for i in range(3)} if note == "plain" else None,
            torch=lambda torch, x1, x2, x3: x1 * x2 + x3,
            note=note,
        )
