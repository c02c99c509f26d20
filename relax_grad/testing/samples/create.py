"""Samples of the operators that create tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from tvm import relax

from ._sample import Sample, register_samples


@register_samples("relax.full")
def full(rng: np.random.Generator) -> Iterator[Sample]:
    for note, shape in (("plain", (2, 3)), ("0-d", ()), ("empty", (2, 0))):

        def function(fill_value: relax.Expr, shape: Sequence[int] = shape) -> relax.Expr:
            return relax.op.full(shape, fill_value)

        yield Sample(
            [np.array(0.7)],
            function=function,
            torch=lambda torch, fill_value, shape=shape: fill_value.expand(shape),
            note=note,
        )


@register_samples("relax.full_like")
def full_like(rng: np.random.Generator) -> Iterator[Sample]:
    yield Sample(
        [rng.normal(size=(2, 3)), np.array(0.7)],
        wrt=[1],
        symbolic={0: {0: "n"}},
        torch=lambda torch, x, fill_value: fill_value.expand(x.shape),
        note="plain",
    )
    yield Sample(
        [rng.integers(0, 9, size=(2, 3)), np.array(0.7)],
        {"dtype": "float64"},
        dtypes=("float32",),
        torch=lambda torch, x, fill_value: fill_value.expand(x.shape),
        note="like integers, to another dtype",
    )
