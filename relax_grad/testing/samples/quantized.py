"""Samples of products with weights of 8 and 4 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ._sample import Sample, register_samples

# The outer extents of the data, the outputs, the inputs, the groups, their size, the dtype, and
# the dtype of the zero points.
_CASES = {
    "8 bits": ((3,), 5, 8, 2, 4, "int8", None),
    "4 bits": ((2, 3), 4, 8, 2, 4, "uint8", None),
    "4 bits, an incomplete group": ((3,), 5, 7, 2, 4, "uint8", None),
    "8 bits, zero points": ((2,), 3, 5, 2, 3, "int8", "int8"),
    "4 bits, zero points": ((2,), 3, 6, 3, 2, "uint8", "uint8"),
    "4 bits, floating-point zero points": ((4,), 3, 9, 2, 6, "uint8", "float64"),
    "a vector and one group": ((), 3, 4, 1, 4, "int8", "float64"),
    "one output": ((2, 1), 1, 1, 1, 2, "uint8", None),
}


@register_samples("relax.grad.quantized_matmul")
def quantized_matmul(rng: np.random.Generator) -> Iterator[Sample]:
    for note, (outer, outputs, inputs, *weight) in _CASES.items():
        data = rng.normal(size=(*outer, inputs))
        operands, floats = _weight(rng, outputs, *weight)
        yield Sample(
            [data, *operands],
            wrt=[0, 2, *floats],
            torch=_torch(inputs),
            tvm_order=1 if outer else None,
            symbolic={0: {0: "n"}} if outer else None,
            note=note,
        )


@register_samples("relax.grad.quantized_matmul_backward_data")
def quantized_matmul_backward_data(rng: np.random.Generator) -> Iterator[Sample]:
    for note, (outer, outputs, inputs, *weight) in _CASES.items():
        grad = rng.normal(size=(*outer, outputs))
        operands, floats = _weight(rng, outputs, *weight)
        yield Sample(
            [grad, (*outer, inputs), *operands],
            wrt=[0, 3, *(1 + place for place in floats)],
            note=note,
        )


def _weight(
    rng: np.random.Generator, outputs: Any, count: Any, size: Any, dtype: Any, zeros: Any
) -> Any:
    """Return numbers, scales and zero points, and the positions of zero points that are
    differentiable."""
    if dtype == "uint8":
        numbers, bound = rng.integers(0, 256, (outputs, count, size // 2)), (0, 16)
    else:
        numbers, bound = rng.integers(-128, 128, (outputs, count, size)), (-128, 128)
    scale = rng.uniform(-0.1, 0.2, (outputs, count))
    operands = [numbers.astype(dtype), scale]
    if zeros == "float64":
        operands.append(rng.uniform(-3, 3, (outputs, count)))
    elif zeros is not None:
        operands.append(rng.integers(*bound, (outputs, count)).astype(zeros))
    return operands, [3] if zeros == "float64" else []


def _torch(inputs: int) -> Callable[..., Any]:
    def forward(torch: Any, data: Any, numbers: Any, scale: Any, zero_point: Any = None) -> Any:
        is_packed = numbers.dtype == torch.uint8
        if is_packed:
            numbers = torch.stack([numbers % 16, numbers // 16], -1).flatten(2)
        offset = (8 if is_packed else 0) if zero_point is None else zero_point[..., None]
        weight = (numbers.to(scale.dtype) - offset) * scale[..., None]
        return data @ weight.flatten(1)[:, :inputs].T

    return forward
