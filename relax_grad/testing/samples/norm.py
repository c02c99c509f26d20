"""Samples of the normalisations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from tvm import relax

from ._sample import DTYPES, Sample, register_samples

_BATCH_NORM: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "training": ((3, 2, 2, 3), {"axis": 1, "training": True}),
    "training, channels last, no scale": (
        (2, 3, 4),
        {"axis": 2, "training": True, "scale": False, "epsilon": 0.1, "momentum": 0.3},
    ),
    "training, channels first, no center": ((3, 4), {"axis": 0, "training": True, "center": False}),
    "training, nothing to average over": ((4,), {"axis": 0, "training": True}),
    "training, negative axis": ((2, 3, 4), {"axis": -2, "training": True}),
    "running statistics": ((2, 3, 2, 2), {"axis": 1, "training": False}),
    "running statistics, negative axis, neither scale nor center": (
        (2, 2, 2, 3),
        {"axis": -1, "training": False, "scale": False, "center": False, "epsilon": 1e-2},
    ),
}


@register_samples("relax.nn.batch_norm")
def batch_norm(rng: np.random.Generator) -> Iterator[Sample]:
    for note, (shape, attrs) in _BATCH_NORM.items():
        inputs = _batch_norm_inputs(rng, shape, attrs["axis"])
        narrow = _dtypes(note in ("training", "running statistics"))
        yield Sample(inputs, attrs, dtypes=narrow, note=note)
    for training in (True, False):
        attrs = {"axis": 1, "training": training, "momentum": 0.2}
        yield Sample(
            _batch_norm_inputs(rng, (3, 2, 4), 1),
            attrs,
            function=_statistics_first,
            symbolic={0: {0: "n", 2: "w"}},
            dtypes=(),
            note="symbolic extents around the channels",
        )
        yield Sample(
            _batch_norm_inputs(rng, (3, 2, 3, 2), 1),
            attrs,
            function=_first_result,
            wrt=[0, 1, 2],
            symbolic={0: {0: "n"}},
            torch=_torch_batch_norm(training),
            dtypes=(),
            note="only the normalized data is used",
        )


def _batch_norm_inputs(rng: np.random.Generator, shape: Sequence[int], axis: int) -> list:
    """Return data with a non-zero mean, gamma, beta, moving mean and moving variance."""
    channels = shape[axis]
    gamma = rng.choice([-1.0, 1.0], channels) * rng.uniform(0.5, 1.5, channels)
    beta, moving_mean = rng.normal(size=channels), rng.normal(size=channels)
    moving_var = rng.uniform(0.5, 1.5, channels)
    return [rng.normal(0.5, 1.0, shape), gamma, beta, moving_mean, moving_var]


def _first_result(*args: relax.Expr, **attrs: Any) -> relax.Expr:
    return relax.TupleGetItem(relax.op.nn.batch_norm(*args, **attrs), 0)


def _statistics_first(*args: relax.Expr, **attrs: Any) -> relax.Expr:
    """Return all results, with the normalized data last.

    The stock pass starts the gradient of a tuple at the last use of an element, with zeros for the
    others. It cannot differentiate zeros of a symbolic shape again.
    """
    result = relax.op.nn.batch_norm(*args, **attrs)
    return relax.Tuple([relax.TupleGetItem(result, i) for i in (1, 2, 0)])


def _torch_batch_norm(training: bool) -> Callable[..., Any]:
    def forward(
        torch: Any, data: Any, gamma: Any, beta: Any, moving_mean: Any, moving_var: Any
    ) -> Any:
        return torch.nn.functional.batch_norm(
            data, moving_mean.detach().clone(), moving_var.detach().clone(), gamma, beta, training
        )

    return forward


# The shape, the axes, further attributes, and the symbolic axes of the data.
_Symbolic = Mapping[int, str] | None

_LayerNorm = tuple[tuple[int, ...], list[int], dict[str, Any], _Symbolic]

_LAYER_NORM: dict[str, _LayerNorm] = {
    "several axes, not the last": ((2, 3, 2, 2), [1, 2], {"epsilon": 0.1}, {0: "n", 2: "m"}),
    "axes that do not rise": ((2, 3, 4), [-1, 0], {}, {1: "n"}),
    "every axis": ((3, 2), [0, 1], {}, {0: "n"}),
}
_LAYER_NORM_ALONE: dict[str, _LayerNorm] = {
    "no scale": ((1, 4), [1], {"scale": False}, {1: "m"}),
    "neither scale nor center": ((3, 2), [0], {"scale": False, "center": False}, None),
    "one element to normalize: 0 over the root of epsilon": ((2, 1), [1], {}, None),
    "nothing to normalize": ((0, 3), [1], {}, None),
}


@register_samples("relax.nn.layer_norm")
def layer_norm(rng: np.random.Generator) -> Iterator[Sample]:
    for note, (shape, axes, attrs, symbolic) in {**_LAYER_NORM, **_LAYER_NORM_ALONE}.items():
        extents = [shape[axis] for axis in axes]
        yield Sample(
            [rng.normal(0.5, 1.0, shape), _slopes(rng, extents), rng.normal(size=extents)],
            {"axes": axes, **attrs},
            symbolic=_of_parameters(symbolic, shape, axes, 2),
            torch=_torch_layer_norm(axes, **attrs),
            dtypes=_dtypes(note in _LAYER_NORM),
            note=note,
        )


@register_samples("relax.nn.rms_norm")
def rms_norm(rng: np.random.Generator) -> Iterator[Sample]:
    for note, (shape, axes, attrs, symbolic) in _LAYER_NORM.items():
        yield Sample(
            [rng.normal(0.5, 1.0, shape), _slopes(rng, [shape[axis] for axis in axes])],
            {"axes": axes, **attrs},
            symbolic=_of_parameters(symbolic, shape, axes, 1),
            torch=_torch_rms_norm(axes, **attrs),
            note=note,
        )


_GROUP_NORM: dict[str, tuple[tuple[int, ...], int, int, list[int], dict[str, Any], _Symbolic]] = {
    "groups": ((2, 4, 2), 2, 1, [2], {}, {0: "n", 2: "w"}),
    "channels last, each a group": ((2, 3, 3), 3, -1, [1], {"epsilon": 0.1}, {1: "w"}),
    "one group": ((2, 3, 2, 2), 1, 1, [2, -1], {}, {0: "n"}),
    "the batch too, channels first": ((4, 2, 2), 2, 0, [1, 2], {}, {1: "n"}),
    "channels only, no scale": ((2, 6), 2, 1, [], {"scale": False}, {0: "n"}),
    "neither scale nor center": ((2, 4, 1), 2, 1, [2], {"scale": False, "center": False}, None),
}


@register_samples("relax.nn.group_norm")
def group_norm(rng: np.random.Generator) -> Iterator[Sample]:
    for i, (note, case) in enumerate(_GROUP_NORM.items()):
        shape, groups, channel, axes, attrs, symbolic = case
        yield Sample(
            _channel_inputs(rng, shape, channel),
            {"num_groups": groups, "channel_axis": channel, "axes": axes, **attrs},
            symbolic={0: symbolic} if symbolic else None,
            torch=_torch_group_norm(groups, channel, axes, **attrs),
            dtypes=("float32", "float16") if i == 0 else (),  # TVM refuses bfloat16
            note=note,
        )


_INSTANCE_NORM: dict[str, tuple[tuple[int, ...], int, list[int], dict[str, Any], _Symbolic]] = {
    "images": ((2, 3, 2, 2), 1, [2, 3], {}, {0: "n", 2: "w"}),
    "channels last, negative, no center": ((2, 4, 3), -1, [-2], {"center": False}, {1: "w"}),
    "neither": ((2, 2, 3), 1, [2], {"scale": False, "center": False, "epsilon": 0.1}, None),
}


@register_samples("relax.nn.instance_norm")
def instance_norm(rng: np.random.Generator) -> Iterator[Sample]:
    for i, (note, (shape, channel, axes, attrs, symbolic)) in enumerate(_INSTANCE_NORM.items()):
        yield Sample(
            _channel_inputs(rng, shape, channel),
            {"channel_axis": channel, "axes": axes, **attrs},
            symbolic={0: symbolic} if symbolic else None,
            torch=_torch_group_norm(shape[channel], channel, axes, **attrs),
            dtypes=_dtypes(i == 0),
            note=note,
        )


@register_samples("relax.grad.divide_by_count")
def divide_by_count(rng: np.random.Generator) -> Iterator[Sample]:
    for shape, axis, count in (((2,), [-1, 0], 15), ((), None, 30), ((2, 2), 1, 2)):
        yield Sample(
            [rng.normal(size=shape), [3, 2, 5]],
            {"axis": axis},
            torch=lambda torch, x, count=count: x / count,
            note=f"axis {axis}",
        )


def _dtypes(narrow: bool) -> Any:
    """Return the dtypes to check besides float64: the default ones if ``narrow``, else none."""
    return Sample.dtypes if narrow else ()


def _same(arguments: Any, names: Any) -> Any:
    """Return the same symbolic axes for several arguments."""
    return dict.fromkeys(arguments, names)


def _slopes(rng: np.random.Generator, shape: int | Sequence[int]) -> np.ndarray:
    """Return factors of both signs and magnitudes from 0.5 to 1.5."""
    return rng.choice([-1.0, 1.0], shape) * rng.uniform(0.5, 1.5, shape)


def _channel_inputs(rng: np.random.Generator, shape: Sequence[int], channel: int) -> list:
    channels = shape[channel]
    return [rng.normal(0.5, 1.0, shape), _slopes(rng, channels), rng.normal(size=channels)]


def _of_parameters(symbolic: Any, shape: Sequence[int], axes: Sequence[int], count: int) -> Any:
    """Return the symbolic axes of the data and of ``count`` parameters, whose axes are the
    normalized ones."""
    if symbolic is None:
        return None
    own = [axis % len(shape) for axis in axes]
    names = {own.index(axis): name for axis, name in symbolic.items() if axis in own}
    return {0: symbolic, **{i: names for i in range(1, count + 1) if names}}


def _torch_layer_norm(
    axes: Sequence[int], epsilon: float = 1e-5, center: bool = True, scale: bool = True
) -> Callable[..., Any]:
    def forward(torch: Any, x: Any, gamma: Any, beta: Any) -> Any:
        to_last = _to_last(x, axes)
        extents = [x.shape[axis] for axis in axes]
        y = torch.nn.functional.layer_norm(
            x.permute(to_last),
            extents,
            gamma if scale else None,
            beta if center else None,
            eps=epsilon,
        )
        return y.permute(np.argsort(to_last).tolist())

    return forward


def _torch_rms_norm(axes: Sequence[int], epsilon: float = 1e-5) -> Callable[..., Any]:
    def forward(torch: Any, x: Any, weight: Any) -> Any:
        to_last = _to_last(x, axes)
        extents = [x.shape[axis] for axis in axes]
        y = torch.nn.functional.rms_norm(x.permute(to_last), extents, weight, eps=epsilon)
        return y.permute(np.argsort(to_last).tolist())

    return forward


def _torch_group_norm(
    groups: int,
    channel: int,
    axes: Sequence[int],
    epsilon: float = 1e-5,
    center: bool = True,
    scale: bool = True,
) -> Callable[..., Any]:
    """Return group_norm in PyTorch, which needs the channels second and normalizes over all later
    axes."""

    def forward(torch: Any, x: Any, gamma: Any, beta: Any) -> Any:
        last = [channel % x.ndim, *(axis % x.ndim for axis in axes)]
        order = [axis for axis in range(x.ndim) if axis not in last] + last
        moved = x.permute(order)
        kept = moved.shape[: x.ndim - len(last)]
        rows = moved.reshape(-1, *moved.shape[len(kept) :])
        y = torch.nn.functional.group_norm(rows, groups, eps=epsilon)
        shape = [1] * x.ndim
        shape[channel] = -1
        y = y.reshape(moved.shape).permute(np.argsort(order).tolist())
        y = y * gamma.reshape(shape) if scale else y
        return y + beta.reshape(shape) if center else y

    return forward


def _to_last(x: Any, axes: Sequence[int]) -> list:
    last = [axis % x.ndim for axis in axes]
    return [axis for axis in range(x.ndim) if axis not in last] + last


#: For each backward operator that normalizes over the axes of gamma, whether it takes gamma and
#: whether a mean.
_OVER_AXES = {
    "layer_norm_backward_data": (True, True),
    "layer_norm_backward_gamma": (False, True),
    "rms_norm_backward_data": (True, False),
    "rms_norm_backward_weight": (False, False),
}


def _register_over_axes(name: str, takes_gamma: bool, takes_mean: bool) -> None:
    """Register samples with arbitrary statistics: the operator is a function of them, independent
    of the data."""

    @register_samples(f"relax.grad.{name}")
    def over_axes(rng: np.random.Generator) -> Iterator[Sample]:
        cases: list[_LayerNorm] = [((2, 3, 2), [2, 0], {}, {1: "n"})]
        if takes_gamma and takes_mean:
            cases.append(((2, 3), [1], {"scale": False}, {0: "n"}))
        for shape, axes, attrs, symbolic in cases:
            of_data = [rng.normal(size=shape), rng.normal(size=shape)]
            gamma = [_slopes(rng, [shape[axis] for axis in axes])] * takes_gamma
            rows = [1 if axis in axes else extent for axis, extent in enumerate(shape)]
            statistics = [rng.normal(size=rows)] * takes_mean + [rng.uniform(0.5, 1.5, rows)]
            first = 2 + takes_gamma
            yield Sample(
                [*of_data, *gamma, *statistics],
                {"axes": axes, **attrs},
                symbolic=_same((0, 1, *range(first, first + len(statistics))), symbolic),
                note=f"over {axes}",
            )


for _name, _takes in _OVER_AXES.items():
    _register_over_axes(_name, *_takes)


def _register_of_channels(
    name: str, statistics_of: Any, attrs: Any, symbolic: Any, takes_gamma: bool
) -> None:
    """Register samples of an operator whose statistics are four tensors with gamma, and two
    without."""

    @register_samples(f"relax.grad.{name}")
    def of_channels(rng: np.random.Generator) -> Iterator[Sample]:
        shape = (2, 3, 2)
        for scale in (True, False) if takes_gamma else (True,):
            of_data = [rng.normal(size=shape), rng.normal(size=shape)]
            gamma = [_slopes(rng, 3)] * takes_gamma
            of_row = statistics_of(shape)
            statistics = [rng.normal(size=of_row), rng.uniform(0.5, 1.5, of_row)]
            statistics += [rng.normal(size=of_row), rng.normal(size=of_row)] * takes_gamma
            yield Sample(
                [*of_data, *gamma, *statistics],
                {**attrs, "scale": scale},
                symbolic=symbolic,
                dtypes=DTYPES if scale else (),
                note="with gamma" if scale else "without gamma",
            )


for _of, _takes_gamma in (("data", True), ("gamma", False)):
    _register_of_channels(
        f"batch_norm_backward_{_of}",
        lambda shape: shape[1],
        {"axis": -2},
        _same((0, 1), {0: "n", 2: "w"}),
        _takes_gamma,
    )
    _register_of_channels(
        f"instance_norm_backward_{_of}",
        lambda shape: (*shape[:2], 1),
        {"channel_axis": 1, "axes": [-1]},
        {
            **_same((0, 1), {0: "n", 2: "w"}),
            **_same(range(3, 7) if _takes_gamma else (2, 3), {0: "n"}),
        },
        _takes_gamma,
    )


#: The statistics: the operator, the attributes, the axes of the mean, and the number of groups of
#: channels.
_STATISTICS = (
    ("batch_norm", {"axis": -2}, (0, 2), None),
    ("layer_norm", {"axes": [2, 0]}, (0, 2), None),
    ("instance_norm", {"channel_axis": 1, "axes": [-1]}, (2,), None),
    ("group_norm", {"num_groups": 2, "channel_axis": 1, "axes": [2]}, (2,), 2),
    ("group_norm", {"num_groups": 1, "channel_axis": -2, "axes": [0, -1]}, (0, 2), 1),
    ("group_norm", {"num_groups": 4, "channel_axis": 1, "axes": []}, (), 4),
    ("rms_norm", {"axes": [-1, 0]}, (0, 2), None),
)


def _register_statistics(name: str) -> None:
    @register_samples(f"relax.grad.{name}_statistics")
    def statistics(rng: np.random.Generator) -> Iterator[Sample]:
        for of, attrs, axes, groups in _STATISTICS:
            if of == name:
                # The stock pass makes zeros of a symbolic shape for each element of the tuple.
                has_symbol = not {0, 2} <= set(axes)
                yield Sample(
                    [rng.normal(0.5, 1.0, (2, 4, 3))],
                    {**attrs, "epsilon": 0.1},
                    symbolic={0: {0: "n", 2: "w"}},
                    tvm_order=1 if has_symbol else None,
                    torch=_torch_statistics(name, axes, groups),
                    note=", ".join(f"{key} {value}" for key, value in attrs.items()),
                )


def _torch_statistics(name: str, axes: Sequence[int], groups: int | None) -> Callable[..., Any]:
    def forward(torch: Any, x: Any) -> Any:
        if name == "rms_norm":
            return torch.rsqrt((x * x).mean(axes, keepdim=True) + 0.1)
        moved = x if groups is None else x.reshape(x.shape[0], groups, -1, x.shape[2])
        over = axes if groups is None else (2, *(axis + (axis > 1) for axis in axes))
        variance, mean = torch.var_mean(moved, over, correction=0, keepdim=True)
        both: Sequence = mean, torch.rsqrt(variance + 0.1)
        if groups is not None:
            shape = [1 if axis in axes else extent for axis, extent in enumerate(x.shape)]
            wide = [shape[0], groups, x.shape[1] // groups, shape[2]]
            both = [tensor.expand(wide).reshape(shape) for tensor in both]
        return tuple(tensor.flatten() if name == "batch_norm" else tensor for tensor in both)

    return forward


for _name in sorted({case[0] for case in _STATISTICS}):
    _register_statistics(_name)
