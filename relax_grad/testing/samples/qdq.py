"""Samples of quantization.

Both operators support only float32 and float16, so the samples cast from float64. The rounding
makes the result a step function, for which finite differences are meaningless. PyTorch has the same
straight-through gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from tvm import relax

from ._sample import Sample, register_samples

# Numbers that are exact in float32, and not halfway between two levels.
_X = np.array([[-80.0, -1.375, 0.0], [0.125, 0.625, 140.0]])


@register_samples("relax.quantize")
def quantize(rng: np.random.Generator) -> Iterator[Sample]:
    for out_dtype, low, high in (("int8", -128, 127), ("uint8", 0, 255)):

        def forward(
            torch: Any, x: Any, scale: Any, zero_point: Any, low: Any = low, high: Any = high
        ) -> Any:
            scale, zero_point = scale.float(), zero_point.float()
            return torch._fake_quantize_learnable_per_tensor_affine(
                x.float(), scale, zero_point, low, high, 1.0
            ).double()

        yield Sample(
            [_X, np.array([0.5]), np.array([3], "int32")],
            {"axis": 0, "out_dtype": out_dtype},
            function=_fake_quantize,
            wrt=[0],
            torch=forward,
            smooth=False,
            note=f"then dequantize, {out_dtype}",
        )

    def of_rows(torch: Any, x: Any, scale: Any, zero_point: Any) -> Any:
        return torch._fake_quantize_learnable_per_channel_affine(
            x.float(), scale.float(), zero_point.float(), 0, -128, 127, 1.0
        ).double()

    yield Sample(
        [_X, np.array([0.5, 0.125]), np.array([0, -5], "int8")],
        {"axis": -2, "out_dtype": "int8"},
        function=_fake_quantize,
        wrt=[0],
        torch=of_rows,
        smooth=False,
        note="then dequantize, a scale for each row",
    )


@register_samples("relax.dequantize")
def dequantize(rng: np.random.Generator) -> Iterator[Sample]:
    data = np.array([[-128, 0, 5], [127, 3, -7]], "int8")

    def function(
        data: relax.Expr, scale: bool, zero_point: relax.Expr, axis: int = -1
    ) -> relax.Expr:
        scale = relax.op.astype(scale, "float32")
        return relax.op.dequantize(data, scale, zero_point, axis, "float32")

    scalar = np.array(3, "int8")
    for note, scale, zero_point, axis in (
        ("one scale", np.array(0.25), scalar, -1),
        ("a scale for each column", np.array([0.25, 0.5, 2.0]), scalar, -1),
        ("a scale for each row", np.array([0.25, 0.5]), np.array([3, 4], "int32"), 0),
    ):
        yield Sample(
            [data, scale, zero_point],
            {"axis": axis},
            function=function,
            symbolic={0: {1 if axis == 0 else 0: "n"}},
            dtypes=(),
            note=note,
        )

    def of_floats(data: Any, scale: bool, zero_point: Any) -> Any:
        return function(relax.op.astype(data, "float32"), scale, zero_point)

    yield Sample(
        [rng.normal(size=(2, 3)), np.array(0.25), scalar],
        function=of_floats,
        dtypes=(),
        note="floating-point data",
    )


def _fake_quantize(
    x: relax.Expr, scale: bool, zero_point: relax.Expr, axis: int, out_dtype: Any
) -> relax.Expr:
    x, scale = relax.op.astype(x, "float32"), relax.op.astype(scale, "float32")
    quantized = relax.op.quantize(x, scale, zero_point, axis, out_dtype)
    result = relax.op.dequantize(quantized, scale, zero_point, axis, "float32")
    return relax.op.astype(result, "float64")
