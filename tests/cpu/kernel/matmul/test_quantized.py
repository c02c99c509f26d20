"""Products with weights of 8 and 4 bits against NumPy in float64, for every vector width."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import ml_dtypes
import numpy as np
import pytest
import tvm
from machines import Run, compile_kernels, each_target, largest_error, of_halves, run_kernels
from quantized_weights import random_weight
from tile_sums import in_order

from relax_grad.cpu import tiles
from relax_grad.cpu.kernel.language.halves import stored_as
from relax_grad.cpu.kernel.matmul.quantized import Quantized, quantized_matmul
from relax_grad.cpu.target import CPU
from relax_grad.cpu.tiles import Permission

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

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


def rounded(
    numbers: np.ndarray, scale: np.ndarray, zero_point: np.ndarray | None = None
) -> np.ndarray:
    """Return the matrix of a weight, computed in float32 and rounded to bfloat16."""
    zero = np.zeros_like(scale) if zero_point is None else zero_point.astype("float32")
    if numbers.dtype == np.uint8:
        numbers = np.stack([numbers & 15, numbers >> 4], -1).reshape(*scale.shape, -1)
        zero = np.full_like(scale, 8) if zero_point is None else zero
    matrix = (numbers.astype("float32") - zero[..., None]) * scale[..., None]
    return matrix.reshape(len(matrix), -1).astype(BFLOAT16).astype("float64")


@pytest.fixture(scope="module")
def tiled():
    """The library of the products of some cases with data of bfloat16 by tiles, the names of their
    functions for some numbers of threads, and the arguments and the factors in float64 of each."""
    target, rng, functions, cases = of_halves("amx"), np.random.default_rng(0), {}, []
    names: list[list[str]] = []
    for rows, outputs, inputs, size, bits, zeros in [CASES[0], *CASES[3:]]:
        operands, _ = random_weight(rng, outputs, inputs, size, bits, zeros)
        matrix = rounded(*operands)[:, :inputs]
        weight = Quantized(outputs, -(-inputs // size), size, bits, zeros)
        for backward in (False, True):
            shapes = [rows, inputs], [rows, outputs]
            data, result = shapes[::-1] if backward else shapes
            names.append([])
            for cores in (1, 2) if rows > 100 else (2,):
                cpu = replace(CPU.of(target), cores=cores)
                names[-1].append(f"f{len(cases)}_{cores}")
                functions[names[-1][-1]] = stored_as(
                    ["bfloat16", *(str(x.dtype) for x in operands), "float32"],
                    1,
                    partial(quantized_matmul, weight, cpu, data, result, backward=backward),
                )
            values = rng.normal(size=data).astype(BFLOAT16)
            factors = values.astype("float64"), matrix if backward else matrix.T
            cases.append(([values, *operands], factors))
    assert all("relax_grad_tiles_add" in str(function) for function in functions.values())
    return compile_kernels(functions, target), names, cases


def test_products_of_tiles(tiled):
    """Odd inputs and outputs end with half a pair, and with a part of a tile."""
    library, names, cases = tiled
    for i, (arrays, factors) in enumerate(cases):
        wanted, results = factors[0] @ factors[1], []
        for name in names[i]:
            result = tvm.runtime.empty(wanted.shape, "float32")
            library[name](*map(tvm.runtime.tensor, arrays), result)
            results.append(result.numpy())
        assert largest_error(results[0], wanted) < 5e-6, i
        assert results[0].tobytes() == results[-1].tobytes(), i
        depth = factors[1].shape[0]
        if depth <= 300 and tiles.permission() is not Permission.GRANTED:
            left, right = (np.pad(x, pad) for x, pad in zip(factors, _whole(depth), strict=True))
            sums = in_order(left, right, np.zeros(wanted.shape, "float32"), len(right) // 32)
            np.testing.assert_array_equal(results[0], sums, err_msg=str(i))


def _whole(depth: int) -> tuple:
    """Return the padding of both factors to whole tiles of k."""
    rest = -depth % 32
    return ((0, 0), (0, rest)), ((0, rest), (0, 0))


def test_scales_that_are_not_finite_stay_in_their_column(tiled):
    """Elements beyond the inputs are 0, not multiples of the scale of their group."""
    library, _, cases = tiled
    (values, numbers, scale, *zero), _ = cases[0]
    values = np.abs(values)
    numbers, scale = np.full_like(numbers, 0xFF), np.abs(scale)
    scale[3] = np.inf
    result = tvm.runtime.empty((70, 45), "float32")
    library["f0_2"](*map(tvm.runtime.tensor, [values, numbers, scale, *zero]), result)
    found = result.numpy()
    assert (found[:, 3] == np.inf).all()
    assert np.isfinite(np.delete(found, 3, axis=1)).all()


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
