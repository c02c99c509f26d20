"""Samples of changes of dtype."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from tvm import relax

from ._sample import Sample, register_samples


@register_samples("relax.astype")
def astype(rng: np.random.Generator) -> Iterator[Sample]:
    yield from _casts(rng, relax.op.astype)
    for dtype in ("int32", "bool"):

        def function(x: relax.Expr, dtype: str = dtype) -> relax.Expr:
            cast = relax.op.astype(relax.op.astype(x, dtype), "float64")
            return relax.op.add(cast, relax.op.astype(x, "float64"))

        yield Sample(
            [np.array([-1.2, 0.0, 0.4, 2.6])],
            function=function,
            torch=lambda torch, x, dtype=dtype: x.to(getattr(torch, dtype)).double() + x,
            dtypes=(),
            smooth=False,
            note=f"a cast through {dtype} passes nothing",
        )


@register_samples("relax.wrap_param")
def wrap_param(rng: np.random.Generator) -> Iterator[Sample]:
    yield from _casts(rng, relax.op.wrap_param)


def _casts(rng: np.random.Generator, operator: Any) -> Iterator[Sample]:
    x = rng.integers(-8, 8, (2, 3)) / 4.0  # exact in every dtype
    for dtype in ("float64", "float32", "float16"):
        yield Sample(
            [x],
            {"dtype": dtype},
            function=operator,
            symbolic={0: {0: "n"}},
            dtypes=(),
            note=f"to {dtype}",
        )

    def there_and_back(x: relax.Expr) -> relax.Expr:
        return operator(operator(x, "bfloat16"), "float64")

    yield Sample(
        [x],
        function=there_and_back,
        torch=lambda torch, x: x.bfloat16().double(),
        dtypes=(),
        smooth=False,
        note="through bfloat16, whose rounding finite differences see",
    )
