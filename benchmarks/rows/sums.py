"""Sums and means: gradients of biases, and reductions over rows, planes and all axes."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax

from ._form import Row

_IMAGE = (8, 64, 56, 56)


def _sum(name: str, shape: tuple[int, ...], axes: Sequence[int]) -> Row:
    return Row(
        "memory",
        name,
        [shape],
        lambda _, x: relax.op.sum(x, list(axes)),
        lambda x: x.sum(tuple(axes)),
    )


ROWS = [
    _sum("bias gradient 8x64x56²", _IMAGE, (0, 2, 3)),
    _sum("bias gradient 1024x3072", (1024, 3072), (0,)),
    _sum("bias gradient 1024x768", (1024, 768), (0,)),
    _sum("sum of rows 1024x3072", (1024, 3072), (1,)),
    Row(
        "memory",
        "mean of all 8x64x56²",
        [_IMAGE],
        lambda _, x: relax.op.mean(x),
        lambda x: x.mean(),
    ),
    Row(
        "memory",
        "mean of planes 8x512x7²",
        [(8, 512, 7, 7)],
        lambda _, x: relax.op.mean(x, [2, 3]),
        lambda x: x.mean((2, 3)),
    ),
]
