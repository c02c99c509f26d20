"""Samples of reductions and scans."""

from __future__ import annotations

import numpy as np

from ._sample import Sample, register_samples

_N = {0: {0: "n"}}
_REDUCTIONS = (
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


@register_samples("relax.sum")
def sum(rng):
    yield from _reductions(rng, lambda torch, x, axis, keep: x.sum(axis, keepdim=keep))
    yield Sample(
        [np.zeros((0, 3))],
        {"axis": [0]},
        torch=lambda torch, x: x.sum(0),
        note="over an empty axis",
    )


@register_samples("relax.mean")
def mean(rng):
    yield from _reductions(rng, lambda torch, x, axis, keep: x.mean(axis, keepdim=keep))


@register_samples("relax.variance")
def variance(rng):
    def forward(torch, x, axis, keep):
        return x.var(axis, correction=0, keepdim=keep)

    yield from _reductions(rng, forward, _REDUCTIONS[::2])
    yield Sample(
        [rng.normal(size=(2, 4)) + 300],
        {"axis": [1]},
        torch=lambda torch, x: x.var(1, correction=0),
        dtypes=("float32",),
        note="a mean far from 0",
    )


def _reductions(rng, forward, cases=_REDUCTIONS):
    for note, shape, axis, keepdims in cases:
        # For PyTorch, no axes are all axes; for TVM, none.
        def torch(torch, x, axis=axis, keepdims=keepdims):
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
