"""Products with weights of 8 and 4 bits against NumPy in float64, for every vector width."""

from __future__ import annotations

import re

import numpy as np
from machines import Run, each_target, largest_error, run_kernels
from quantized_weights import random_weight

from relax_grad.cpu.kernel.matmul.quantized import Quantized, quantized_matmul
from relax_grad.cpu.target import CPU

#: Rows, outputs, inputs, the size of a group, the bits, and the dtype of the zero points.
CASES = [
    (70, 45, 70, 32, 4, ""),
    (5, 33, 300, 32, 8, ""),
    (1, 100, 600, 16, 4, "float32"),
    (131, 270, 520, 48, 4, "uint8"),
    (12, 1, 1, 16, 8, "int8"),
    (3, 513, 1025, 128, 8, "float32"),
]


@each_target
def test_products_and_their_gradients(target):
    """Sizes around vectors, tiles, tasks, and stretches of the sum; incomplete groups."""
    rng = np.random.default_rng(0)
    runs, wanted = [], []
    for rows, outputs, inputs, size, bits, zeros in CASES:
        operands, matrix = random_weight(rng, outputs, inputs, size, bits, zeros)
        weight = Quantized(outputs, -(-inputs // size), size, bits, zeros)
        shapes = [rows, inputs], [rows, outputs]
        for backward in (False, True):
            data, result = shapes[::-1] if backward else shapes
            kernel = quantized_matmul(weight, CPU.of(target), data, result, backward=backward)
            values = rng.normal(size=data).astype("float32")
            runs.append(Run(kernel, [values, *operands], [tuple(result)]))
            wanted.append(values.astype("float64") @ (matrix if backward else matrix.T))
    for (output,), expected in zip(run_kernels(runs, target), wanted, strict=True):
        assert largest_error(output, expected) < 5e-6


def test_the_weight_never_exists_as_floats():
    """The panels of a task are as long as a stretch of the sum, whatever the size of the weight."""
    for size in (1024, 4096):
        weight = Quantized(size, size // 32, 32, 4)
        for backward in (False, True):
            kernel = quantized_matmul(
                weight, CPU(16, 32, 2), [64, size], [64, size], backward=backward
            )
            allocated = largest_allocation(kernel)
            assert allocated <= 256 * 32 * 40 < size * size // 2


def largest_allocation(kernel) -> int:
    """Return the elements of the largest buffer that a kernel allocates."""
    return max(map(int, re.findall(r"alloc_buffer\(\((\d+),?\)", kernel.script())))
