"""The digests of functions, by which their machine code is kept."""

from __future__ import annotations

import operator
import struct

import numpy as np
import pytest
from tvm import s_tir, te, tirx

from relax_grad.cpu.codegen.lower import content


def function(
    value: float = 0.5,
    dtype: str = "float32",
    extent: int = 8,
    index: str = "int64",
    name: str = "x",
    op=tirx.max,
    scale: int = 3,
    kind: str | None = None,
    **buffer,
) -> tirx.PrimFunc:
    """Return a function that is other code for other arguments."""
    x = te.placeholder((tirx.const(extent, index),), dtype, name=name)
    y = te.compute(
        x.shape,
        lambda i: op(x[i], tirx.FloatImm(dtype, value)) * tirx.const(scale, dtype),
        name="y",
    )
    made = te.create_prim_func([x, y])
    if kind is not None:
        schedule = s_tir.Schedule(made)
        (loop,) = schedule.get_loops(schedule.get_sblock("y"))
        getattr(schedule, kind)(loop)
        made = schedule.mod["main"]
    return made.with_attrs(buffer) if buffer else made


def quiet_nan(payload: int) -> float:
    return struct.unpack("<d", struct.pack("<Q", 0x7FF8 << 48 | payload))[0]


def test_equal_functions_have_one_digest():
    made = function()
    assert content(made) == content(function())
    assert content(made.with_attr("global_symbol", "other")) == content(made)
    assert content(s_tir.renew_defs(made)) == content(made)


@pytest.mark.parametrize(
    "changes",
    [
        ("value", [0.0, -0.0]),
        ("value", [0.1, float(np.nextafter(0.1, 1)), float(np.nextafter(0.1, 0))]),
        ("value", [float("nan"), quiet_nan(1), quiet_nan(2), -float("nan")]),
        ("value", [float("inf"), -float("inf"), 1e30, 1e-40]),
        ("dtype", ["float32", "float64", "float16"]),
        ("extent", [8, 9, 8 + 2**32]),
        ("index", ["int32", "int64"]),
        ("op", [operator.add, operator.sub, tirx.max, tirx.min]),
        ("scale", [3, 4]),
        ("kind", [None, "parallel", "unroll", "vectorize"]),
        ("attribute", [1, 2, "1", "2", 1.0, 0.0, True, (1, 2), (2, 1)]),
    ],
    ids=lambda changes: changes[0],
)
def test_other_code_has_another_digest(changes):
    name, values = changes
    digests = {content(function(**{name: value})) for value in values}
    assert len(digests) == len(values)


def test_buffers_with_other_fields_have_other_digests():
    def loading(**fields):
        buffer = tirx.decl_buffer((4,), "float32", "x", **fields)
        body = tirx.Evaluate(tirx.BufferLoad(buffer, [tirx.const(0, "int32")]))
        return tirx.PrimFunc([buffer], body)

    fields = [
        {},
        {"data_alignment": 16},
        {"offset_factor": 4},
        {"elem_offset": 2},
        {"strides": [2]},
        {"scope": "local"},
    ]
    digests = [content(loading(**each)) for each in fields]
    assert len(set(digests)) == len(fields)
