"""The data gradient of a strided convolution by phases, and weight gradients in parts, against the
undivided sums."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import numpy as np
import pytest
import tvm
from sweep import TARGET
from tvm import te

from relax_grad.topi.conv import conv_backward_data, conv_backward_weight
from relax_grad.topi.conv_phases import conv_backward_data_by_phases, join_phases
from relax_grad.topi.util import sum_of_parts


def drawn(number: int) -> Iterator[dict]:
    """Yield shapes and attributes of convolutions of each rank, which may skip data at the end."""
    rng = random.Random(0)
    while number:
        rank = rng.choice((1, 2, 3))
        strides, kernel, before, after, out, rest = (
            [rng.randint(low, high) for _ in range(rank)]
            for low, high in ((1, 4), (1, 5), (0, 4), (0, 4), (1, 4), (0, 3))
        )
        extents = [
            (o - 1) * s + k - b - a + r % s
            for o, s, k, b, a, r in zip(out, strides, kernel, before, after, rest, strict=True)
        ]
        if min(extents) < 1:
            continue
        number -= 1
        groups, spatial = rng.choice((1, 2)), "DHW"[3 - rank :]
        sizes = {
            "data": {"N": 2, "C": 3 * groups, **dict(zip(spatial, extents, strict=True))},
            "out": {"N": 2, "C": 2 * groups, **dict(zip(spatial, out, strict=True))},
            "kernel": {"O": 2 * groups, "I": 3, **dict(zip(spatial, kernel, strict=True))},
        }
        layouts = {
            "data": rng.choice((f"NC{spatial}", f"N{spatial}C")),
            "out": rng.choice((f"NC{spatial}", f"N{spatial}C")),
            "kernel": rng.choice((f"OI{spatial}", f"{spatial}IO")),
        }
        yield {
            "strides": strides,
            "padding": [*before, *after],
            "groups": groups,
            "layouts": {f"{name}_layout": layout for name, layout in layouts.items()},
            "shapes": {name: [sizes[name][axis] for axis in layouts[name]] for name in sizes},
        }


def functions(case: dict) -> Iterator[tuple]:
    """Yield the undivided sums of a case with those by phases or in parts, and their operands."""
    shapes, strides, padding = case["shapes"], case["strides"], case["padding"]
    out, data, kernel = (
        te.placeholder(shapes[name], "float32", name) for name in ("out", "data", "kernel")
    )
    own = {**case["layouts"], "groups": case["groups"], "out_dtype": "float32"}
    ones = [1] * len(strides)
    whole = conv_backward_data(out, kernel, shapes["data"], strides, padding, ones, **own)
    phases = conv_backward_data_by_phases(out, kernel, shapes["data"], strides, padding, **own)
    layout = own["data_layout"]
    joined = join_phases(phases, shapes["data"], strides, padding, layout, "float32")
    yield [out, kernel], whole, joined
    weight = out, data, shapes["kernel"], strides, padding, ones
    summed = [2, *(int(extent) for extent in _spatial(shapes["out"], own["out_layout"]))]
    parts = [max(d for d in (1, 2, 3) if extent % d == 0) for extent in summed]
    partial = conv_backward_weight(*weight, **own, parts=parts)
    total = sum_of_parts(partial, len(parts), "float32")
    yield [out, data], conv_backward_weight(*weight, **own), total


def _spatial(shape: list[int], layout: str) -> list[int]:
    return [shape[layout.index(name)] for name in sorted(layout) if name not in "NC"]


@pytest.fixture(scope="module")
def compiled():
    pairs = [pair for case in drawn(16) for pair in functions(case)]
    module = tvm.IRModule(
        {
            f"{kind}{number}": te.create_prim_func([*operands, result]).with_attr(
                "global_symbol", f"{kind}{number}"
            )
            for number, (operands, *results) in enumerate(pairs)
            for kind, result in zip(("whole", "divided"), results, strict=True)
        }
    )
    return pairs, tvm.compile(module, TARGET)


def test_divided_sums_are_the_undivided_ones(compiled):
    pairs, library = compiled
    rng = np.random.default_rng(0)
    for number, (operands, whole, _) in enumerate(pairs):
        values = [
            tvm.runtime.tensor(rng.normal(size=[int(e) for e in each.shape]).astype("float32"))
            for each in operands
        ]
        results = []
        for kind in ("whole", "divided"):
            shape = [int(extent) for extent in whole.shape]
            results.append(tvm.runtime.tensor(np.full(shape, math.nan, "float32")))
            library[f"{kind}{number}"](*values, results[-1])
        np.testing.assert_allclose(results[1].numpy(), results[0].numpy(), rtol=1e-4, atol=1e-5)


def test_phases_have_the_terms_that_are_not_zero():
    out = te.placeholder((1, 1, 4, 4), "float32")
    kernel = te.placeholder((1, 1, 3, 1), "float32")
    layouts = {"data_layout": "NCHW", "kernel_layout": "OIHW", "out_layout": "NCHW"}
    shape, dtype = (1, 1, 9, 7), "float32"
    phases = conv_backward_data_by_phases(
        out, kernel, shape, [2, 2], [0, 0, 0, 0], 1, **layouts, out_dtype=dtype
    )
    # A kernel of one element has one phase, in place of two.
    assert [int(extent) for extent in phases.shape] == [2, 1, 1, 1, 5, 4]
    (total,) = phases.op.body
    assert [int(axis.dom.extent) for axis in total.axis] == [1, 2, 1]
