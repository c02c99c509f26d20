"""Kernels of convolutions against PyTorch in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import strategies as st
from machines import Run, at, largest_error, run_kernels

from relax_grad.cpu.kernel.conv.geometry import Conv2d, Conv3d, Windows
from relax_grad.cpu.target import CPU

RNG = np.random.default_rng(0)


def check_weight_gradients(
    make: Callable, convs: Sequence[Conv2d | Conv3d], target, batch: Sequence[int] = ()
) -> None:
    """Compare the weight gradients of kernels, compiled together, with those of PyTorch.

    ``batch`` gives the values of a symbolic batch.
    """
    _check(make, convs, target, batch, ("out", "data"), "weight")


def check_data_gradients(
    make: Callable, convs: Sequence[Conv2d | Conv3d], target, batch: Sequence[int] = ()
) -> None:
    """Compare the data gradients of kernels with those of PyTorch, like
    :func:`check_weight_gradients`."""
    _check(make, convs, target, batch, ("out", "weight"), "data")


def check_convolutions(
    make: Callable, convs: Sequence[Conv2d | Conv3d], target, batch: Sequence[int] = ()
) -> None:
    """Compare the results of kernels with those of PyTorch, like :func:`check_weight_gradients`."""
    _check(make, convs, target, batch, ("data", "weight"), "out")


def draw_inputs(conv: Conv2d) -> list[np.ndarray]:
    """Return random arrays for the gradient of the result and for the data."""
    return list(_draw(conv, {}, ("out", "data")).values())


def _check(make, convs, target, batch, operands: Sequence[str], wanted: str) -> None:
    cases = [
        (conv, function, {"batch": size})
        for conv in convs
        for function in [make(conv, CPU.of(target))]
        for size in batch or [0]
    ]
    inputs = [_draw(conv, extents, operands) for conv, _, extents in cases]
    runs = [
        Run(function, list(arrays.values()), [_shape(conv, extents, wanted)])
        for (conv, function, extents), arrays in zip(cases, inputs, strict=True)
    ]
    results = run_kernels(runs, target)
    for (conv, _, extents), arrays, (result,) in zip(cases, inputs, results, strict=True):
        error = largest_error(result, expected(conv, arrays, result.shape, wanted))
        assert error < 4e-6, (conv, extents)


def _draw(conv: Conv2d, extents: Mapping[str, int], names: Sequence[str]) -> dict[str, np.ndarray]:
    return {name: RNG.normal(size=_shape(conv, extents, name)).astype("float32") for name in names}


def _shape(conv: Conv2d, extents: Mapping[str, int], name: str) -> tuple[int, ...]:
    return at(getattr(conv, f"{name}_shape"), extents)


def expected(conv: Conv2d, arrays: Mapping[str, np.ndarray], shape, wanted: str) -> np.ndarray:
    """Return the tensor ``wanted`` of shape ``shape``, computed by PyTorch from the other two
    tensors."""
    torch = pytest.importorskip("torch")
    if 0 in shape or any(array.size == 0 for array in arrays.values()):
        return np.zeros(shape)
    tensors = {name: torch.from_numpy(array).double() for name, array in arrays.items()}
    if wanted != "out":
        tensors[wanted] = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    depth, images = ([conv.depth], conv.slices) if isinstance(conv, Conv3d) else ([], conv)
    axes = [*depth, images.height, images.width]
    output = getattr(torch.nn.functional, f"conv{len(axes)}d")(
        torch.nn.functional.pad(
            tensors["data"],
            [size for axis in reversed(axes) for size in (axis.before, axis.after)],
        ),
        tensors["weight"],
        stride=[axis.stride for axis in axes],
        dilation=[axis.dilation for axis in axes],
        groups=images.groups,
    )
    if wanted == "out":
        return output.numpy()
    output.backward(tensors["out"])
    return tensors[wanted].grad.numpy()


@st.composite
def axes(draw, kernels: int = 6, strides: Sequence[int] = (1, 1, 2, 3, 5, 17)):
    """Draw the size, kernel, stride, padding before and after, and dilation of an axis."""
    kernel, dilation = draw(st.integers(1, kernels)), draw(st.integers(1, 3))
    before, after = draw(st.integers(0, 4)), draw(st.integers(0, 4))
    least = max(1, (kernel - 1) * dilation + 1 - before - after)
    size = draw(st.integers(least, least + 20))
    return size, kernel, draw(st.sampled_from(strides)), before, after, dilation


@st.composite
def convolutions(draw, ins: int = 50, outs: int = 40, groups: Sequence[int] = (1,), **more):
    """Draw convolutions with any attributes; ``ins`` and ``outs`` are the maximal channels of a
    group."""
    number = draw(st.sampled_from(groups))
    columns = zip(*(draw(axes(**more)) for _ in range(2)), strict=True)
    size, kernel, strides, before, after, dilation = columns
    return Conv2d(
        draw(st.integers(1, 5)),
        number * draw(st.integers(1, ins)),
        number * draw(st.integers(1, outs)),
        size,
        kernel,
        strides,
        (*before, *after),
        dilation,
        number,
    )


@st.composite
def depthwise_convolutions(draw, channels: int = 50, **more):
    """Draw depthwise convolutions with any attributes and at most ``channels`` channels."""
    number = draw(st.integers(2, channels))
    return replace(
        draw(convolutions(**more)), in_channels=number, out_channels=number, groups=number
    )


@st.composite
def volumes(draw, **more):
    """Draw convolutions of volumes with any attributes."""
    images = draw(convolutions(ins=24, outs=24, groups=(1, 1, 1, 2, 3), kernels=4, **more))
    axis = draw(axes(kernels=4, strides=(1, 1, 2, 3)))
    depth = replace(Windows(*axis), size=min(axis[0], 9 + axis[1] * axis[5]))
    return Conv3d(replace(images, batch=min(images.batch, 2)), depth)
