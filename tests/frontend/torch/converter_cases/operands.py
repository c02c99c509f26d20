"""The operands of the calls of PyTorch's operators: one generator draws all, in the order of the
calls."""

from __future__ import annotations

import torch

RNG = torch.Generator().manual_seed(0)

DTYPES = {
    "f64": torch.float64,
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "i64": torch.int64,
    "i32": torch.int32,
    "u8": torch.uint8,
    "bool": torch.bool,
}


def normal(*shape, dtype=torch.float64) -> torch.Tensor:
    """Return normal numbers; whole ones for integers."""
    values = torch.randn(shape, generator=RNG, dtype=torch.float64)
    if dtype is torch.bool:
        return values > 0
    if dtype is torch.uint8:
        return (values.abs() * 3).to(dtype)
    return (values if dtype.is_floating_point else values * 3).to(dtype)


def whole(*shape, dtype=torch.float64) -> torch.Tensor:
    """Return small whole numbers, which have ties and lie at kinks."""
    return torch.randint(-4, 5, shape, generator=RNG).to(dtype)


def positive(*shape, dtype=torch.float64) -> torch.Tensor:
    return normal(*shape, dtype=torch.float64).abs().add(0.1).to(dtype)


def unit(*shape) -> torch.Tensor:
    return torch.rand(shape, generator=RNG, dtype=torch.float64) * 1.8 - 0.9


def index(high: int, *shape, dtype=torch.int64) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=RNG).to(dtype)
