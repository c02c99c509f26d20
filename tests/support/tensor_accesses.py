"""Tensor functions of all kinds of access, for guard pages and emulated kernels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tvm import relax, te, tirx, topi

__all__ = ["ACCESSES", "Access"]

#: Indices at and beyond the bounds of an axis of 5; the harness adds the limits of the dtype.
WILD = np.array([0, 4, 5, 6, -1, -5, -6, 10**6], "int64")


def _data_gather(x, index):
    """Read where data says, if that is in bounds."""
    zero = tirx.const(0.0, x.dtype)

    def element(i, j):
        is_inside = tirx.And(index[i] >= 0, index[i] < 5)
        return tirx.if_then_else(is_inside, x[index[i], j] * x[index[i], j], zero)

    return te.compute((len(WILD), 3), element)


def _data_of_data(x, index):
    """The index of an index."""
    zero = tirx.const(0.0, x.dtype)

    def element(i):
        inner = index[tirx.min(tirx.max(index[i], 0), len(WILD) - 1)]
        return tirx.if_then_else(tirx.And(inner >= 0, inner < 5), tirx.exp(x[inner]), zero)

    return te.compute((len(WILD),), element)


def _window(x):
    """A window that leaves the data at both ends."""
    zero, k = tirx.const(0.0, x.dtype), te.reduce_axis((0, 5), "k")

    def element(i):
        place = i * 2 + k - 2
        inside = tirx.And(place >= 0, place < 7)
        return te.sum(tirx.if_then_else(inside, x[place] * x[place], zero), k)

    return te.compute((4,), element)


#: Tensor expressions by name, and their arguments: arrays, or shapes of random ones.
ACCESSES = {
    "gather by data": (_data_gather, (5, 3), WILD),
    "gather by data of data": (_data_of_data, (5,), WILD),
    "take": (lambda x, i: topi.take(x, i, 0, mode="clip"), (5, 3), WILD),
    "take of all": (lambda x, i: topi.take(x, i, mode="wrap"), (5, 3), WILD),
    "strides": (lambda x: topi.strided_slice(x, [6, 1], [0, 5], [-2, 3]), (7, 5)),
    "pad": (lambda x: topi.nn.pad(x, [2, 0], [0, 3]), (3, 5)),
    "mirror pad": (lambda x: topi.nn.mirror_pad(x, [2, 1], [1, 2], "REFLECT"), (3, 5)),
    "permutation": (lambda x: topi.multiply(topi.transpose(x), topi.transpose(x)), (3, 5)),
    "reshape": (lambda x: topi.reshape(topi.exp(x), (5, 3)), (3, 5)),
    "repeat": (lambda x: topi.repeat(x, 3, 1), (3, 5)),
    "tile": (lambda x: topi.tile(x, (2, 3)), (3, 5)),
    "window": (_window, (7,)),
    "sum": (lambda x: topi.sum(topi.multiply(x, x), 0), (3, 5)),
    "max": (lambda x: topi.max(x, 1), (3, 5)),
    "prod": (lambda x: topi.prod(x, 1), (3, 5)),
    "cumsum": (lambda x: topi.cumsum(x, 1), (3, 5)),
    "cumprod": (lambda x: topi.cumprod(x, 0), (3, 5)),
    "matmul": (topi.matmul, (3, 5), (5, 2)),
    "max pool": (
        lambda x: topi.nn.pool2d(x, (3, 2), (2, 2), (1, 1), (1, 0, 1, 0), "max"),
        (1, 1, 5, 6),
    ),
    "convolution": (lambda x, w: topi.nn.conv2d_nchw(x, w, 2, 1, 1), (1, 2, 5, 6), (2, 2, 3, 3)),
    "depth to space": (lambda x: topi.nn.depth_to_space(x, 2), (1, 4, 2, 3)),
}


@dataclass(frozen=True)
class Access:
    """A call of one of :data:`ACCESSES` as a tensor function, which other processes find by its
    name."""

    name: str

    def __call__(self, *args):
        return relax.BlockBuilder.current().emit_te(
            ACCESSES[self.name][0], *args, primfunc_name_hint=self.name.replace(" ", "_")
        )

    def inputs(self) -> list[np.ndarray]:
        """Return the arguments."""
        rng = np.random.default_rng(0)
        return [
            rng.normal(size=operand) if isinstance(operand, tuple) else operand
            for operand in ACCESSES[self.name][1:]
        ]
