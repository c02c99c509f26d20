"""Samples of selection and search."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ._sample import Sample, register_samples


@register_samples("relax.where")
def where(rng: np.random.Generator) -> Iterator[Sample]:
    for note, cond, x1, x2, symbolic in (
        ("one shape", (2, 3), (2, 3), (2, 3), {i: {0: "n"} for i in range(3)}),
        ("x1 broadcast", (2, 3), (1, 3), (2, 3), {0: {0: "n"}, 2: {0: "n"}}),
        ("x2 of lower rank", (2, 3), (2, 3), (3,), {0: {0: "n"}, 1: {0: "n"}}),
        ("x1 and x2 broadcast", (2, 3), (2, 1), (1, 1), {0: {0: "n"}, 1: {0: "n"}}),
        ("cond broadcast", (3,), (2, 3), (2, 1), {1: {0: "n"}, 2: {0: "n"}}),
        ("each broadcast along another axis", (2, 1, 1), (3, 1), (4,), {0: {0: "n"}}),
        ("0-d cond", (), (2, 3), (2, 3), None),
        ("0-d operands", (2, 3), (), (), {0: {0: "n"}}),
        ("0-d", (), (), (), None),
        ("empty", (0, 3), (1, 3), (3,), None),
    ):
        yield Sample(
            [rng.normal(size=cond) > 0, rng.normal(size=x1), rng.normal(size=x2)],
            symbolic=symbolic,
            torch=lambda torch, cond, x1, x2: torch.where(cond, x1, x2),
            note=note,
        )
    yield Sample(
        [np.array([True, False]), np.array([1.0, np.nan]), np.array([np.inf, 2.0])],
        torch=lambda torch, cond, x1, x2: torch.where(cond, x1, x2),
        smooth=False,
        note="NaN and infinity in the branch that is not taken",
    )
