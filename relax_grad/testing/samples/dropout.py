"""Samples of dropout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from tvm import relax

from ._sample import Sample, register_samples


@register_samples("relax.nn.dropout")
def dropout(rng: np.random.Generator) -> Iterator[Sample]:
    def forward(torch: Any, x: Any) -> Any:
        return x, torch.ones_like(x)

    yield Sample([rng.normal(size=(2, 3))], {"rate": 0.5}, torch=forward, note="both results")
    yield Sample(
        [rng.normal(size=(2, 3))],
        {"rate": 0.1},
        function=_masked,
        symbolic={0: {0: "n"}},
        tvm_order=1,
        note="symbolic, without the mask",
    )


def _masked(x: relax.Expr, rate: float) -> relax.Expr:
    return relax.TupleGetItem(relax.op.nn.dropout(x, rate), 0)
