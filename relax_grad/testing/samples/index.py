"""Samples of indexing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from tvm import relax

from ._sample import Sample, register_samples

_SMALLEST, _LARGEST = np.iinfo("int64").min, np.iinfo("int64").max


@register_samples("relax.take")
def take(rng: np.random.Generator) -> Iterator[Sample]:
    def sample(note: str, shape: Sequence[int], indices: Any, **attrs: Any) -> Sample:
        indices = np.asarray(indices)
        return Sample(
            [rng.normal(size=shape), indices],
            attrs,
            symbolic={0: dict(enumerate("nml"[: len(shape)]))},
            torch=_torch_take(**attrs),
            note=note,
        )

    yield sample("repeated and negative", (3, 4, 2), [0, 2, 2, -1], axis=1)
    yield sample("embedding of a batch", (5, 3), np.array([[0, 4, 1], [4, 4, 2]], "int32"), axis=0)
    yield sample("negative axis", (2, 3, 4), [[3, -4], [0, 0]], axis=-1)
    yield sample("index of rank 0", (2, 3), np.array(-1), axis=1)
    yield sample("no axis", (5,), [4, 1, 1])
    yield sample("wide behind the axis", (3, 70), [2, 2, 0], axis=0)
    yield sample("no index", (3, 2), np.zeros((0,), "int64"), axis=0)
    yield sample("uint8", (3, 2), np.array([2, 0, 2], "uint8"), axis=0)
    outside = [7, -1, 2, -7, _SMALLEST, _LARGEST]
    yield sample("clip", (4, 3), outside, axis=0, mode="clip")
    yield sample("wrap", (2, 4), outside, axis=1, mode="wrap")
    yield sample("clip, no axis", (4,), [outside], mode="clip")
    yield Sample(
        [rng.normal(size=(4, 3)), np.array([0, 3, 3])],
        {"axis": 0, "mode": "nan"},
        torch=lambda torch, x, i: x[i],
        note="nan, all inside",
    )
    yield Sample(
        [rng.normal(size=(2, 3))],
        {"axis": 1},
        function=_take_scalar,
        symbolic={0: {0: "n", 1: "m"}},
        torch=lambda torch, x: x[:, -1],
        note="a scalar index, as importers write x[:, -1]",
    )
    yield Sample(
        [rng.normal(size=(2, 3))],
        {"axis": 1},
        function=_take_constant,
        symbolic={0: {0: "n", 1: "m"}},
        torch=lambda torch, x: x[:, [0, -1, 0]],
        note="constant indices",
    )


def _take_scalar(x: relax.Expr, axis: int) -> relax.Expr:
    return relax.op.take(x, relax.prim_value(-1), axis)


def _take_constant(x: relax.Expr, axis: int) -> relax.Expr:
    return relax.op.take(x, relax.const([0, -1, 0]), axis)


def _torch_take(axis: int = 0, mode: str = "fast") -> Callable[..., Any]:
    def forward(torch: Any, x: Any, indices: Any) -> Any:
        size = x.shape[axis]
        indices = indices.long()
        if mode == "clip":
            indices = indices.clamp(0, size - 1)
        indices = torch.remainder(indices, size)
        taken = x.index_select(axis, indices.flatten())
        return taken.unflatten(axis, indices.shape) if indices.ndim else taken.squeeze(axis)

    return forward


@register_samples("relax.gather_elements")
def gather_elements(rng: np.random.Generator) -> Iterator[Sample]:
    for note, shape, indices, axis in (
        ("class of each row", (4, 5), [[1], [4], [4], [0]], 1),
        ("repeated", (3, 2), [[0, 2], [2, 2], [2, 1], [0, 2]], 0),
        ("negative", (2, 3, 2), [[[-1, 0], [-1, -3]], [[2, 1], [0, 0]]], -2),
        ("fewer rows than the data", (4, 3), [[0, 2, 2, 1], [1, 1, 0, 0]], -1),
        ("rank 1", (5,), [4, 4, 0], 0),
    ):
        yield Sample(
            [rng.normal(size=shape), np.array(indices, "int32")],
            {"axis": axis},
            symbolic={0: dict(enumerate("nml"[: len(shape)]))},
            torch=_torch_gather(axis),
            note=note,
        )
    yield Sample(
        [rng.normal(size=(3, 4)), rng.integers(0, 4, (3, 2))],
        {"axis": 1},
        symbolic={0: {0: "n"}, 1: {0: "n"}},
        torch=_torch_gather(1),
        note="symbolic batch of both",
    )
    yield Sample([rng.normal(size=(3, 4)), np.zeros((3, 0), "int64")], {"axis": 1}, note="no index")


def _torch_gather(axis: int) -> Callable[..., Any]:
    def forward(torch: Any, data: Any, indices: Any) -> Any:
        indices = torch.remainder(indices.long(), data.shape[axis])
        return data.gather(axis, indices)

    return forward


@register_samples("relax.strided_slice")
def strided_slice(rng: np.random.Generator) -> Iterator[Sample]:
    def sample(
        note: str,
        shape: Sequence[int],
        axes: Sequence[int],
        begin: Sequence[int],
        end: Sequence[int],
        strides: Any = None,
        symbolic: Any = "nml",
        **attrs: Any,
    ) -> Sample:
        names = {i: name for i, name in enumerate(symbolic[: len(shape)]) if name != "-"}
        return Sample(
            [rng.normal(size=shape)],
            {"axes": axes, "begin": begin, "end": end, "strides": strides, **attrs},
            symbolic={0: names},
            torch=_torch_slice(axes, begin, end, strides),
            note=note,
        )

    yield sample("one axis", (4, 5), [1], [1], [3])
    # "-" is an axis that stays constant: TVM cannot prove the extents of some slices equal to
    # themselves in a broadcast.
    yield sample("steps", (7, 2, 5), [0, 2], [1, 0], [7, 5], [3, 2], symbolic="-m-")
    yield sample("negative axis and begin", (3, 5), [-1], [-3], [-1])
    yield sample("backwards", (6, 4, 2), [0, 1], [4, -1], [1, -9], [-1, -2], symbolic="--l")
    yield sample("begin and end beyond", (5, 3), [0, 1], [-99, 1], [_LARGEST, 99], [2, 1])
    yield sample("the last one", (4, 3), [0], [-1], [_LARGEST])
    yield sample("reversed from beyond", (5,), [0], [2**62], [-(2**62)], [-2])
    yield sample("step beyond the axis", (4, 3), [0], [1], [4], [50])
    yield sample("assume_inbound", (5, 4), [0], [1], [5], [2], assume_inbound=True)
    yield sample("no axes", (2, 3), [], [], [])
    yield Sample(
        [rng.normal(size=(4, 3))],
        {"axes": [0], "begin": [9], "end": [12]},
        torch=lambda torch, x: x[9:12],
        note="empty",
    )


def _torch_slice(
    axes: Sequence[int], begin: Sequence[int], end: Sequence[int], strides: Any
) -> Callable[..., Any]:
    def forward(torch: Any, x: Any) -> Any:
        for axis, first, last, step in zip(
            axes, begin, end, strides or [1] * len(axes), strict=True
        ):
            taken = range(x.shape[axis])[first:last:step]
            x = x.index_select(axis, torch.tensor(list(taken), dtype=torch.long))
        return x

    return forward


@register_samples("relax.dynamic_strided_slice")
def dynamic_strided_slice(rng: np.random.Generator) -> Iterator[Sample]:
    for note, begin, end, strides in (
        ("steps", [1, 0], [4, 5], [2, 3]),
        ("negative", [-3, -1], [-1, -9], [1, -2]),
        ("beyond", [-99, _LARGEST], [_LARGEST, _SMALLEST], [_LARGEST, -1]),
    ):
        bounds = [np.array(bound) for bound in (begin, end, strides)]
        yield Sample(
            [rng.normal(size=(4, 5)), *bounds],
            order=1,
            function=_sum_of_dynamic_slice,
            symbolic={0: {0: "n", 1: "m"}},
            torch=_torch_sum_of_dynamic_slice,
            note=f"{note}; the result has no known shape: TVM can compile little but its sum, "
            "and no rule takes the product with it that the second order has",
        )


def _sum_of_dynamic_slice(
    x: relax.Expr, begin: Sequence[int], end: Sequence[int], strides: Any
) -> relax.Expr:
    cubes = relax.op.multiply(x, relax.op.multiply(x, x))
    return relax.op.sum(relax.op.dynamic_strided_slice(cubes, begin, end, strides))


def _torch_sum_of_dynamic_slice(torch: Any, x: Any, begin: Any, end: Any, strides: Any) -> Any:
    bounds = [bound.tolist() for bound in (begin, end, strides)]
    return _torch_slice(range(x.ndim), *bounds)(torch, x**3).sum()


@register_samples("relax.grad.take_backward")
def take_backward(rng: np.random.Generator) -> Iterator[Sample]:
    yield Sample(
        [rng.normal(size=(2, 3)), rng.normal(size=(2, 4)), np.array([1, -1, 9])],
        {"axis": 1},
        wrt=[0],
        symbolic={0: {0: "n"}, 1: {0: "n", 1: "m"}},
        note="repeated, one outside",
    )


@register_samples("relax.grad.take_jvp")
def take_jvp(rng: np.random.Generator) -> Iterator[Sample]:
    yield Sample(
        [rng.normal(size=(2, 4)), np.array([[1], [-1], [9]])],
        {"axis": -1},
        symbolic={0: {0: "n", 1: "m"}},
        note="one outside",
    )


@register_samples("relax.grad.gather_elements_backward_data")
def gather_elements_backward_data(rng: np.random.Generator) -> Iterator[Sample]:
    for indices in (np.array([[1, -1, 1], [9, 0, 0]]), np.array([[1, 1, 9], [3, 0, 0]], "uint8")):
        yield Sample(
            [rng.normal(size=(2, 3)), (2, 4), indices], {"axis": 1}, note="repeated, one outside"
        )


@register_samples("relax.grad.gather_elements_jvp")
def gather_elements_jvp(rng: np.random.Generator) -> Iterator[Sample]:
    yield Sample(
        [rng.normal(size=(2, 4)), np.array([[1, -1, 1], [9, 0, 0]])],
        {"axis": 1},
        symbolic={0: {0: "n", 1: "m"}, 1: {0: "n"}},
        note="repeated, one outside",
    )


@register_samples("relax.grad.strided_slice_backward_data")
def strided_slice_backward_data(rng: np.random.Generator) -> Iterator[Sample]:
    yield Sample(
        [rng.normal(size=(2, 3)), (5, 3)],
        {"axes": [0], "begin": [-1], "end": [0], "strides": [-2]},
        note="backwards",
    )


@register_samples("relax.grad.dynamic_strided_slice_backward_data")
def dynamic_strided_slice_backward_data(rng: np.random.Generator) -> Iterator[Sample]:
    bounds = [np.array(bound) for bound in ([1, 0], [4, 3], [2, 1])]
    yield Sample(
        [rng.normal(size=(2, 3)), (5, 3), *bounds],
        tvm_order=1,
        note="steps; its gradient names an extent by match_cast",
    )
