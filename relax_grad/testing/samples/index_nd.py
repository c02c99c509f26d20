"""Samples of gather_nd and index_tensor, and of their backward operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ._sample import Sample, register_samples


@register_samples("relax.gather_nd")
def gather_nd(rng: np.random.Generator) -> Iterator[Sample]:
    for note, shape, indices, batch_dims in (
        ("elements, repeated and negative", (3, 4), [[0, 1], [2, -1], [-3, 1], [2, 3]], 0),
        ("slices", (3, 2, 2), [[[1], [1]], [[-1], [0]]], 0),
        ("one vector", (2, 3), [1, -2], 0),
        ("batch of two axes", (2, 1, 3), [[[2]], [[0]]], 2),
        ("no index", (3, 2), np.zeros((0, 1), "int64"), 0),
    ):
        yield Sample(
            [rng.normal(size=shape), np.array(indices)],
            {"batch_dims": batch_dims},
            symbolic={0: dict(enumerate("nml"[: len(shape)]))} if batch_dims == 0 else None,
            torch=_torch_gather_nd(batch_dims),
            note=note,
        )
    yield Sample(
        [rng.normal(size=(3, 4)), np.array([[[0], [-1]], [[1], [1]], [[3], [0]]])],
        {"batch_dims": 1},
        symbolic={0: {0: "n", 1: "m"}, 1: {0: "n", 1: "p"}},
        torch=_torch_gather_nd(1),
        note="symbolic batch of both",
    )


def _torch_gather_nd(batch_dims: int) -> Callable[..., Any]:
    def forward(torch: Any, data: Any, indices: Any) -> Any:
        at = list(indices.unbind(-1))
        for axis in range(batch_dims):
            own = torch.arange(data.shape[axis])
            shape = [1] * at[0].ndim
            shape[axis] = -1
            at.insert(axis, own.reshape(shape))
        return data[tuple(at)]

    return forward


@register_samples("relax.index_tensor")
def index_tensor(rng: np.random.Generator) -> Iterator[Sample]:
    row, column = np.array([[0], [-1], [0]]), np.array([2, 2, -3, 1], "int32")
    for note, shape, indices, symbolic in (
        ("broadcast, repeated and negative", (3, 4), (row, column), "nm"),
        ("first axis only", (3, 2, 2), (np.array([2, 0, 2]),), "nml"),
        ("two of three axes", (3, 4, 2), (row, column), "nml"),
        ("of rank 0", (3, 2), (np.array(-1),), "nm"),
        ("with rank 0, extent 1", (1, 4), (np.array(-1, "int32"), column), "-m"),
        ("no index", (3, 2), (np.zeros((0, 2), "int64"),), "nm"),
    ):
        yield Sample(
            [rng.normal(size=shape), indices],
            symbolic={0: {i: name for i, name in enumerate(symbolic) if name != "-"}},
            torch=_torch_index,
            note=note,
        )


def _torch_index(torch: Any, data: Any, indices: Any) -> Any:
    return data[tuple(index.long() for index in indices)]


@register_samples("relax.grad.gather_nd_jvp")
def gather_nd_jvp(rng: np.random.Generator) -> Iterator[Sample]:
    yield Sample(
        [rng.normal(size=(3, 2)), np.array([[0], [2], [0]], "uint8")], note="unsigned indices"
    )
    yield Sample(
        [rng.normal(size=(2, 3)), np.array([[[2], [9]], [[-4], [-1]]])],
        {"batch_dims": 1},
        symbolic={0: {0: "n", 1: "m"}, 1: {0: "n"}},
        note="batch, some outside",
    )


@register_samples("relax.grad.gather_nd_backward_data")
def gather_nd_backward_data(rng: np.random.Generator) -> Iterator[Sample]:
    yield Sample([rng.normal(size=(3, 2)), (4, 2), np.array([[0], [-1], [0]], "int32")])
    yield Sample(
        [rng.normal(size=(2, 2)), (2, 3), np.array([[[2], [9]], [[-4], [2]]])],
        {"batch_dims": 1},
        note="batch, some outside",
    )


@register_samples("relax.grad.index_tensor_jvp")
def index_tensor_jvp(rng: np.random.Generator) -> Iterator[Sample]:
    indices = (np.array([[0], [-1]]), np.array([1, 0, 9], "uint8"))
    yield Sample(
        [rng.normal(size=(3, 2, 2)), indices],
        symbolic={0: {0: "n", 2: "l"}},
        note="broadcast, some outside",
    )


@register_samples("relax.grad.index_tensor_backward_data")
def index_tensor_backward_data(rng: np.random.Generator) -> Iterator[Sample]:
    indices = (np.array([[0], [-1]]), np.array([1, 0, 9], "uint8"))
    yield Sample([rng.normal(size=(2, 3, 2)), (3, 2, 2), indices], note="broadcast, some outside")
