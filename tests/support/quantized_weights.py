"""Random weights of 8 and 4 bits, and their elements in float64."""

from __future__ import annotations

import numpy as np


def random_weight(
    rng: np.random.Generator, outputs: int, inputs: int, size: int, bits: int, zeros: str = ""
) -> tuple[list[np.ndarray], np.ndarray]:
    """Return numbers, scales and zero points, if they have a dtype, and the matrix
    ``(outputs, inputs)``."""
    groups = -(-inputs // size)
    low, high, dtype = (-128, 128, "int8") if bits == 8 else (0, 16, "uint8")
    numbers = rng.integers(low, high, (outputs, groups, size))
    scale = rng.uniform(-0.1, 0.2, (outputs, groups)).astype("float32")
    zero = np.full((outputs, groups), 0 if bits == 8 else 8)
    if zeros == "float32":
        zero = rng.uniform(-3, 3, (outputs, groups)).astype("float32")
    elif zeros:
        zero = rng.integers(low, high, (outputs, groups)).astype(zeros)
    matrix = (numbers - zero[..., None].astype("float64")) * scale[..., None].astype("float64")
    stored = numbers if bits == 8 else numbers[..., ::2] + 16 * numbers[..., 1::2]
    operands = [stored.astype(dtype), scale, *([zero] if zeros else [])]
    return operands, matrix.reshape(outputs, -1)[:, :inputs]
