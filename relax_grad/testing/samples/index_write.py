"""Samples of the operators that write at indices, and of their backward operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from tvm import relax

from ._sample import Sample, register_samples

_REDUCE = {"add": "sum", "mul": "prod", "mean": "mean", "max": "amax", "min": "amin"}


def _torch_reduce(
    torch: Any, data: Any, axis: Any, indices: Any, updates: Any, reduction: Any
) -> Any:
    """Scatter with all indices wrapped in-bounds; PyTorch's gradient of ``update`` assumes distinct
    indices."""
    indices = torch.remainder(indices.long(), data.shape[axis])
    if reduction == "update":
        return data.scatter(axis, indices, updates)
    return data.scatter_reduce(axis, indices, updates, _REDUCE[reduction])


@register_samples("relax.scatter_elements")
def scatter_elements(rng: np.random.Generator) -> Iterator[Sample]:
    def sample(
        note: str, shape: Sequence[int], indices: Any, axis: int, reduction: str, torch: Any = True
    ) -> Sample:
        indices = np.asarray(indices)
        # TVM's sum over an empty symbolic axis is undefined.
        along = {axis: "k"} if indices.size else {}
        return Sample(
            [rng.normal(size=shape), indices, rng.normal(size=indices.shape)],
            {"axis": axis, "reduction": reduction},
            symbolic={0: dict(enumerate("nml"[: len(shape)])), 1: along, 2: along},
            torch=_torch_elements(axis, reduction) if torch else None,
            note=note,
        )

    different = np.array([[0, -1], [3, 1]], "int32")
    repeated = [[0, 2, 0], [0, -1, 1], [-4, 2, 1]]
    yield sample("different", (2, 4), different, 1, "update")
    yield sample("repeated: the last one wins", (4, 3), repeated, 0, "update", torch=False)
    yield sample("repeated", (4, 3), repeated, 0, "add")
    yield sample("fewer rows than the data", (3, 4, 2), [[[0], [3]], [[-1], [3]]], 1, "add")
    yield sample("different", (2, 4), different, 1, "mean")
    yield sample("repeated: half, a quarter, ...", (4, 3), repeated, 0, "mean", torch=False)
    yield sample("repeated", (4, 3), repeated, 0, "mul")
    yield sample("repeated", (4, 3), repeated, 0, "max")
    yield sample("repeated", (4, 3), repeated, 0, "min")
    yield sample("no index", (3, 2), np.zeros((0, 2), "int64"), 0, "update")
    yield sample("uint8", (5,), np.array([4, 0, 4], "uint8"), 0, "add")
    # No zeros, one zero and two zeros among the factors, in the data and in the updates.
    data = np.array([2.0, 0.0, 0.0, 3.0, -1.5])
    updates = np.array([3.0, 2.0, 0.0, 0.0, 0.0, -2.0, 4.0])
    yield Sample(
        [data, np.array([0, 1, 2, 3, 3, 0, 4]), updates],
        {"reduction": "mul"},
        torch=_torch_elements(0, "mul"),
        note="zeros",
    )
    ties = [np.array([1.0, 2.0, 0.0]), np.array([0, 1, 1, 0, 0, 1]), np.array([1.0, 3, 3, 1, 0, 2])]
    for reduction, sign in (("max", 1), ("min", -1)):
        yield Sample(
            [sign * ties[0], ties[1], sign * ties[2]],
            {"reduction": reduction},
            torch=_torch_elements(0, reduction),
            smooth=False,
            note="ties share evenly",
        )
    yield Sample(
        [rng.normal(size=(2, 3)), rng.integers(0, 3, (2, 2)), rng.normal(size=(2, 2))],
        {"axis": -1, "reduction": "mul"},
        symbolic={0: {0: "n", 1: "m"}, 1: {0: "n", 1: "k"}, 2: {0: "n", 1: "k"}},
        torch=_torch_elements(-1, "mul"),
        note="symbolic batch of all",
    )


def _torch_elements(axis: int, reduction: str) -> Callable[..., Any]:
    def forward(torch: Any, data: Any, indices: Any, updates: Any) -> Any:
        return _torch_reduce(torch, data, axis, indices, updates, reduction)

    return forward


@register_samples("relax.scatter_nd")
def scatter_nd(rng: np.random.Generator) -> Iterator[Sample]:
    def sample(
        note: str,
        shape: Sequence[int],
        indices: Any,
        reduction: str,
        torch: Any = True,
        symbolic: Any = "nml",
    ) -> Sample:
        indices = np.asarray(indices)
        updates = (*indices.shape[:-1], *shape[indices.shape[-1] :])
        names = dict(enumerate(symbolic[: indices.shape[-1]]))
        return Sample(
            [rng.normal(size=shape), indices, rng.normal(size=updates)],
            {"reduction": reduction},
            symbolic={0: names},
            torch=_torch_nd(reduction) if torch else None,
            note=note,
        )

    points = [[0, 1], [-1, 2], [0, -2], [0, 1]]
    rows = [[[2], [0]], [[-1], [0]]]
    yield sample("different", (3, 3), points[:2], "update")
    yield sample("repeated: the last one wins", (3, 3), points, "update", torch=False)
    yield sample("rows", (3, 2), np.array(rows, "int32"), "add")
    yield sample("one vector", (2, 3), [1, -1], "add")
    yield sample("repeated", (3, 3), points, "mul")
    yield sample("rows", (3, 2), rows, "mul")
    yield sample("rows", (3, 2), rows, "max")
    yield sample("repeated", (3, 3), points, "min")
    yield sample("no index", (3, 2), np.zeros((0, 1), "int64"), "update")
    yield Sample(
        [np.array([[1.0, 2.0], [0.0, 0.0]]), np.array([[0], [0]]), np.array([[1.0, 3], [0, 3]])],
        {"reduction": "max"},
        torch=_torch_nd("max"),
        smooth=False,
        note="ties share evenly",
    )


def _torch_nd(reduction: str) -> Callable[..., Any]:
    def forward(torch: Any, data: Any, indices: Any, updates: Any) -> Any:
        count = indices.shape[-1]
        sizes = data.shape[:count]
        flat = torch.zeros(indices.shape[:-1], dtype=torch.long)
        for i, size in enumerate(sizes):
            flat = flat * size + torch.remainder(indices[..., i].long(), size)
        rows = data.reshape(sizes.numel(), -1)
        flat = flat.reshape(-1, 1).expand(-1, rows.shape[1])
        updates = updates.reshape(flat.shape)
        return _torch_reduce(torch, rows, 0, flat, updates, reduction).reshape(data.shape)

    return forward


@register_samples("relax.index_put")
def index_put(rng: np.random.Generator) -> Iterator[Sample]:
    row, column = np.array([[0], [-1], [1]]), np.array([2, -4], "int32")
    for note, shape, indices, values, accumulate in (
        ("different", (3, 4), (np.array([0, -1]), np.array([1, 1])), (2,), False),
        ("broadcast indices", (3, 4), (row, column), (3, 2), True),
        ("broadcast values", (3, 4), (row, column), (2,), False),
        ("broadcast values", (3, 4), (row, column), (1, 2), True),
        ("value of rank 0", (3, 4), (row, column), (), False),
        ("uint8", (4,), (np.array([2, 0], "uint8"),), (2,), True),
        ("no index", (3,), (np.zeros((0,), "int64"),), (0,), False),
    ):
        yield Sample(
            [rng.normal(size=shape), indices, rng.normal(size=values)],
            {"accumulate": accumulate},
            symbolic={0: dict(enumerate("nm"[: len(shape)]))},
            torch=_torch_put(accumulate),
            note=note,
        )
    repeated = (np.array([1, -2, 0, 1]), np.array([0, 0, 1, 0]))
    yield Sample(
        [rng.normal(size=(3, 2)), repeated, rng.normal(size=4)],
        {"accumulate": False},
        note="repeated: the last one wins",
    )
    yield Sample(
        [rng.normal(size=(3, 2)), repeated, rng.normal(size=4)],
        {"accumulate": True},
        torch=_torch_put(True),
        note="repeated",
    )
    yield Sample(
        [rng.normal(size=(3, 4)), (row, column), rng.normal(size=6)],
        {"accumulate": False},
        torch=lambda torch, x, i, v: _torch_put(False)(torch, x, i, v.reshape(3, 2)),
        note="values listed one after the other",
    )
    yield Sample(
        [rng.normal(size=4), np.array([3, 1]), rng.normal(size=2)],
        symbolic={0: {0: "n"}, 1: {0: "k"}, 2: {0: "k"}},
        torch=lambda torch, x, i, v: x.index_put((i,), v),
        note="one tensor of indices",
    )


def _torch_put(accumulate: bool) -> Callable[..., Any]:
    def forward(torch: Any, data: Any, indices: Any, values: Any) -> Any:
        indices = tuple(index.long() for index in indices)
        return data.index_put(indices, values, accumulate)

    return forward


@register_samples("relax.slice_scatter")
def slice_scatter(rng: np.random.Generator) -> Iterator[Sample]:
    def sample(
        note: str,
        shape: Sequence[int],
        src: Sequence[int],
        start: int,
        end: int,
        step: int,
        axis: int,
        symbolic: Any = "nml",
        torch: Any = True,
    ) -> Sample:
        return Sample(
            [rng.normal(size=shape), rng.normal(size=src)],
            {"start": start, "end": end, "step": step, "axis": axis},
            symbolic={0: {i: s for i, s in enumerate(symbolic[: len(shape)]) if s != "-"}},
            torch=(lambda torch, x, y: x.slice_scatter(y, axis, start, end, step))
            if torch
            else None,
            note=note,
        )

    yield sample("steps", (6, 2), (2, 2), 1, 5, 2, 0, "n-")
    yield sample("last axis", (2, 3, 5), (2, 3, 2), 2, 4, 1, -1, "--l")
    yield sample("all", (3, 2), (3, 2), 0, 3, 1, 0, "--")
    yield sample("the last one", (4,), (1,), 3, 4, 5, 0, "n")
    yield sample("nothing", (4, 2), (0, 2), 2, 2, 1, 0, "n-")
    yield sample("beyond both ends", (3, 4), (3, 5), -3, 7, 2, 1, "-m", torch=False)


@register_samples("relax.grad.scatter_elements_backward_updates")
def scatter_elements_backward_updates(rng: np.random.Generator) -> Iterator[Sample]:
    indices = np.array([[0, 9], [2, -1], [0, 2]])
    for reduction in ("update", "mean"):
        yield Sample(
            [rng.normal(size=(3, 2)), indices],
            {"axis": 0, "reduction": reduction},
            symbolic={0: {0: "n", 1: "m"}, 1: {0: "k", 1: "m"}},
            note="repeated, some outside",
        )


@register_samples("relax.grad.scatter_nd_backward_updates")
def scatter_nd_backward_updates(rng: np.random.Generator) -> Iterator[Sample]:
    yield Sample(
        [rng.normal(size=(3, 2)), np.array([[0], [-1], [5], [0]], "int32")],
        symbolic={0: {0: "n", 1: "m"}},
        note="repeated, some outside",
    )


@register_samples("relax.grad.index_put_backward_values")
def index_put_backward_values(rng: np.random.Generator) -> Iterator[Sample]:
    indices = (np.array([[0], [1], [0]]), np.array([1, 9], "uint8"))
    yield Sample([rng.normal(size=(2, 2)), indices], note="repeated, some outside")


@register_samples("relax.grad.slice_scatter_backward_src")
def slice_scatter_backward_src(rng: np.random.Generator) -> Iterator[Sample]:
    for src_shape, start, end, step in (((2, 2), 1, 5, 2), ((5, 2), -1, 4, 1)):
        yield Sample(
            [rng.normal(size=(3, 2))],
            {"src_shape": src_shape, "start": start, "end": end, "step": step, "axis": 0},
            function=_slice_scatter_backward_src,
            note="beyond the axis",
        )


def _slice_scatter_backward_src(
    output_grad: relax.Expr, src_shape: Sequence[int], **attrs: Any
) -> relax.Expr:
    return relax.op.grad.slice_scatter_backward_src(output_grad, src_shape, **attrs)


def _scan_samples(
    rng: np.random.Generator, start: Sequence[int], indices: Any, factors: Any, **attrs: Any
) -> Iterator[Sample]:
    arguments = [rng.normal(size=start), np.array(indices), rng.normal(size=factors)]
    yield Sample(arguments, attrs, note="repeated, some outside")
    yield Sample([*arguments, rng.normal(size=factors)], attrs, note="with terms")


@register_samples("relax.grad.scatter_elements_scan")
def scatter_elements_scan(rng: np.random.Generator) -> Iterator[Sample]:
    yield from _scan_samples(rng, (3,), [0, 2, 0, 9, -3], (5,), axis=0)


@register_samples("relax.grad.scatter_elements_scan_reverse")
def scatter_elements_scan_reverse(rng: np.random.Generator) -> Iterator[Sample]:
    yield from _scan_samples(rng, (2, 3), [[0, 2, 0, 9, -3]], (1, 5), axis=1)


@register_samples("relax.grad.scatter_nd_scan")
def scatter_nd_scan(rng: np.random.Generator) -> Iterator[Sample]:
    yield from _scan_samples(rng, (3, 2), [[0], [2], [0], [9], [-3]], (5, 2))


@register_samples("relax.grad.scatter_nd_scan_reverse")
def scatter_nd_scan_reverse(rng: np.random.Generator) -> Iterator[Sample]:
    yield from _scan_samples(rng, (2, 3), [[0, 1], [1, 1], [0, -2], [0, 1]], (4,))
