"""Samples of element-wise functions of one argument."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ._sample import Sample, register_samples

_INF = np.inf

#: For each function an interval in which it is smooth, and its special points.
_FUNCTIONS = {
    "abs": ((0.2, 1), [0.0, -0.0, _INF, -_INF, 5e-324, -5e-324]),
    "acos": ((-0.8, 0.8), [0.0, 1.0, -1.0]),
    "acosh": ((1.2, 3), [1.0, 1e30, _INF]),
    "asin": ((-0.8, 0.8), [0.0, 1.0, -1.0]),
    "asinh": ((-2, 2), [0.0, 1e30, -1e30, _INF]),
    "atan": ((-2, 2), [0.0, 1e30, _INF, -_INF]),
    "atanh": ((-0.8, 0.8), [0.0, 1.0]),
    "cos": ((-2, 2), [0.0]),
    "cosh": ((-2, 2), [0.0, 800.0]),
    "erf": ((-2, 2), [0.0, 30.0, _INF, -_INF]),
    "exp": ((-2, 2), [0.0, -800.0, -_INF, 800.0]),
    "log": ((0.5, 2), [0.0, _INF]),
    "negative": ((-2, 2), [0.0, _INF]),
    "rsqrt": ((0.5, 2), [0.0, _INF]),
    "sigmoid": ((-2, 2), [0.0, 800.0, -800.0, _INF, -_INF]),
    "sin": ((-2, 2), [0.0]),
    "sinh": ((-2, 2), [0.0, -800.0]),
    "sqrt": ((0.5, 2), [0.0, _INF]),
    "square": ((-2, 2), [0.0, -1e30, _INF]),
    "tan": ((-1, 1), [0.0]),
    "tanh": ((-2, 2), [0.0, 30.0, -30.0, _INF, -_INF]),
}


def _register(name: str) -> None:
    (low, high), special = _FUNCTIONS[name]

    def torch(torch: Any, x: Any) -> Any:
        return getattr(torch, {"negative": "neg"}.get(name, name))(x)

    @register_samples(f"relax.{name}")
    def samples(rng: np.random.Generator) -> Iterator[Sample]:
        yield Sample(
            [rng.uniform(low, high, (2, 3))], symbolic={0: {0: "n"}}, torch=torch, note="plain"
        )
        yield Sample([rng.uniform(low, high, ())], torch=torch, dtypes=(), note="0-d")
        yield Sample([np.array(special)], torch=torch, smooth=False, note="special points")


for _name in _FUNCTIONS:
    _register(_name)


@register_samples("relax.clip")
def clip(rng: np.random.Generator) -> Iterator[Sample]:
    def forward(low: Any, high: Any) -> Any:
        return {"torch": lambda torch, x: x.clamp(low, high)}

    x = np.array([[-2.0, -0.9, -0.2], [0.4, 0.8, 1.7]])
    yield Sample(
        [x, -0.5, 1.2],
        **forward(-0.5, 1.2),
        symbolic={0: {0: "n", 1: "m"}},
        note="between two bounds",
    )
    yield Sample([x, -1, 1], **forward(-1, 1), dtypes=(), note="integer bounds")
    yield Sample([x, -_INF, 0.5], **forward(-_INF, 0.5), note="bounded above")
    yield Sample([x, 0.5, _INF], **forward(0.5, _INF), note="bounded below")
    yield Sample([np.array(0.3), 0.0, 1.0], **forward(0.0, 1.0), dtypes=(), note="0-d")
    yield Sample([np.zeros((2, 0)), 0.0, 1.0], **forward(0.0, 1.0), note="empty")
    yield Sample(
        [np.array([-1.0, 1.0, -1 - 1e-15, 1 + 1e-15, 0.0, _INF, -_INF]), -1.0, 1.0],
        **forward(-1.0, 1.0),
        smooth=False,
        note="on the bounds and beside them",
    )
