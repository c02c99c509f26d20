"""Samples of sorting."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ._sample import Sample, register_samples

_N = {0: {0: "n"}}
#: TVM sorts bfloat16 wrongly, and the rules refuse it.
_DTYPES = ("float32", "float16")


@register_samples("relax.sort")
def sort(rng: np.random.Generator) -> Iterator[Sample]:
    for note, shape, axis, descending in (
        ("the last axis", (2, 4), -1, False),
        ("another axis, descending", (3, 2), 0, True),
        ("an extent of 1", (2, 1), 1, False),
        ("an empty axis", (2, 0), 1, False),
    ):
        yield Sample(
            [rng.normal(size=shape)],
            {"axis": axis, "descending": descending},
            symbolic=_N,
            torch=lambda torch, x, axis=axis, descending=descending: (
                torch.sort(x, stable=True, dim=axis, descending=descending).values
            ),
            dtypes=_DTYPES,
            note=note,
        )
    for descending in (False, True):
        yield Sample(
            [np.array([1.0, 0.0, 1.0, 0.0, 1.0])],
            {"descending": descending},
            torch=lambda torch, x, descending=descending: (
                torch.sort(x, stable=True, descending=descending).values
            ),
            smooth=False,
            dtypes=_DTYPES,
            note="ties keep their order",
        )


@register_samples("relax.topk")
def topk(rng: np.random.Generator) -> Iterator[Sample]:
    for note, shape, k, attrs in (
        ("values and indices", (2, 4), 2, {}),
        ("the smallest, along another axis", (4, 2), 3, {"axis": 0, "largest": False}),
        ("indices in int64", (2, 3), 1, {"dtype": "int64"}),
        ("values only, every one", (2, 3), -1, {"ret_type": "values", "axis": -1}),
        ("as many as there are", (2, 3), 3, {"ret_type": "values", "axis": -1}),
        ("another axis empty", (0, 3), 2, {"ret_type": "values"}),
    ):

        def torch(torch: Any, x: Any, k: Any = k, attrs: Any = attrs) -> Any:
            axis = attrs.get("axis", -1)
            count = k if k > 0 else x.shape[axis]
            return torch.topk(x, count, dim=axis, largest=attrs.get("largest", True)).values

        values_only = "ret_type" in attrs
        yield Sample(
            [rng.normal(size=shape)],
            {"k": k, **attrs},
            tvm_order=None if values_only or attrs.get("axis") == 0 else 1,
            symbolic=_N,
            torch=torch,
            dtypes=_DTYPES,
            note=note,
        )
    yield Sample(
        [rng.normal(size=(2, 4))], {"k": 2}, dtypes=(), note="to second order by TVM's pass"
    )

    # The rule recomputes indices that are not integers.
    yield Sample(
        [rng.normal(size=(2, 4))],
        {"k": 2, "dtype": "float32"},
        dtypes=(),
        note="indices in float32",
    )
