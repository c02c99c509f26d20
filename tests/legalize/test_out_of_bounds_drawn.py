"""No kernel reads or writes out of bounds, for calls of drawn shapes and attributes."""

from __future__ import annotations

import numpy as np
import pytest
from guard import Case, check_out_of_bounds, random
from sweep import SHARE

#: The least calls of a kind, whatever the share of the sweeps.
_LEAST = 25


def shapes(rng, rank: int, least: int = 1) -> tuple[int, ...]:
    return tuple(rng.integers(least, 6, rank).tolist())


def drawn_index(rng):
    """Draw a call of an operator that reads or writes at indices."""
    dtype = rng.choice(["int32", "int64"])
    kind = rng.choice(["take", "gather_elements", "gather_nd", "scatter_elements", "scatter_nd"])
    shape = shapes(rng, rng.integers(1, 4))
    axis = int(rng.integers(-len(shape), len(shape)))
    if kind == "take":
        index = rng.integers(-7, 7, shapes(rng, rng.integers(0, 3), 0)).astype(dtype)
        attrs = {"axis": axis, "mode": str(rng.choice(["fast", "wrap", "clip", "nan"]))}
        return f"relax.{kind}", [random(*shape), index], attrs
    if kind.endswith("elements"):
        # A gather's result has the extents of its indices. The indices of a scatter fit into its
        # data.
        other = [
            min(size, int(rng.integers(1, 6)))
            if i != axis % len(shape)
            else int(rng.integers(1, 9))
            for i, size in enumerate(shape)
        ]
        index = rng.integers(-7, 7, other).astype(dtype)
    else:
        depth = int(rng.integers(1, len(shape) + 1))
        outer = shapes(rng, rng.integers(1, 3))
        index = rng.integers(-7, 7, (*outer, depth)).astype("int64")
        other = (*outer, *shape[depth:])
    inputs = [random(*shape), index]
    if kind == "gather_nd":
        return f"relax.{kind}", inputs, {}
    attrs = {} if kind == "scatter_nd" else {"axis": axis}
    if kind.startswith("scatter"):
        inputs.append(random(*other))
        attrs["reduction"] = str(rng.choice(["update", "add", "mul", "min", "max"]))
    return f"relax.{kind}", inputs, attrs


def drawn_window(rng):
    """Draw a convolution or a pooling with a window that fits."""
    rank = int(rng.integers(1, 4))
    channels = int(rng.integers(1, 4))
    size, window, strides, dilation = (rng.integers(1, most, rank) for most in (7, 4, 4, 3))
    padding = rng.integers(0, 3, 2 * rank)
    size = np.maximum(size, (window - 1) * dilation + 1 - padding[:rank] - padding[rank:])
    attrs = {
        "strides": strides.tolist(),
        "dilation": dilation.tolist(),
        "padding": padding.tolist(),
    }
    data = random(1, channels, *size)
    kind = rng.choice(["conv", "max_pool", "avg_pool"])
    if kind == "conv":
        return f"relax.nn.conv{rank}d", [data, random(2, channels, *window)], attrs
    attrs.update(pool_size=window.tolist(), ceil_mode=bool(rng.integers(2)))
    return f"relax.nn.{kind}{rank}d", [data], attrs


def drawn_resize(rng):
    """Draw a resize in two dimensions."""
    modes = ["half_pixel", "align_corners", "asymmetric", "pytorch_half_pixel"]
    attrs = {
        "size": shapes(rng, 2),
        "method": str(rng.choice(["nearest_neighbor", "linear", "cubic"])),
        "coordinate_transformation_mode": str(rng.choice(modes)),
    }
    return "relax.image.resize2d", [random(1, 2, *shapes(rng, 2)).astype("float32")], attrs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draw", "number"), [(drawn_index, 150), (drawn_window, 100), (drawn_resize, 50)]
)
def test_drawn_shapes(draw, number):
    rng = np.random.default_rng(0)
    drawn = max(_LEAST, round(number * SHARE))
    cases = [
        Case(f"{i} {op} {attrs}", op, inputs, attrs)
        for i, (op, inputs, attrs) in enumerate(draw(rng) for _ in range(drawn))
    ]
    check_out_of_bounds(cases)
