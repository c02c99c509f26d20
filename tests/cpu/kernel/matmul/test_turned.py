"""Products of few columns that are computed as those of the transposed factors."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import tvm
from machines import Run, compile_kernels, each_target, largest_error, run_kernels
from tvm import tirx

from relax_grad.cpu.kernel.language.halves import stored_as
from relax_grad.cpu.kernel.matmul._ways import is_transposed
from relax_grad.cpu.kernel.matmul.consumed import is_consumable
from relax_grad.cpu.kernel.matmul.matmul import Matmul, matmul
from relax_grad.cpu.target import CPU
from relax_grad.cpu.tuning import ICE_LAKE, ZEN4
from relax_grad.ir.dtypes import HALVES

RNG = np.random.default_rng(0)
FORMS = list(itertools.product((False, True), repeat=2))
WIDE, NARROW = CPU(16, 32, 2, tuning=ICE_LAKE), CPU(8, 16, 2)


def check(products, target, **properties):
    """Compare turned products with NumPy's in float64."""
    cpu = replace(CPU.of(target), **properties)
    runs = []
    for product in products:
        *inputs, output = product.shapes()
        arrays = [RNG.normal(size=shape).astype("float32") for shape in inputs]
        runs.append(Run(matmul(product, cpu, way="turned"), arrays, [output]))
    for product, run, (result,) in zip(products, runs, run_kernels(runs, target), strict=True):
        a, b = (array.astype("float64") for array in run.inputs)
        a = np.swapaxes(a, -1, -2) if product.transpose_a else a
        b = np.swapaxes(b, -1, -2) if product.transpose_b else b
        assert largest_error(result, a @ b) < 2e-6, product


@each_target
@pytest.mark.parametrize(("transpose_a", "transpose_b"), FORMS)
def test_turned_products(target, transpose_a, transpose_b):
    """Parts of vectors of rows and of columns, several stretches, sums that threads divide, and
    results that they transpose in parts."""
    sizes = [(2, 2, 3), (16, 16, 16), (33, 17, 70), (1000, 3, 40), (45, 9, 600), (1100, 37, 30)]
    sizes.append((64, 10, 8200))
    products = [Matmul(*size, transpose_a, transpose_b) for size in sizes]
    products.append(Matmul(70, 5, 33, transpose_a, transpose_b, 3))
    products.append(Matmul(19, 21, 40, transpose_a, transpose_b, 4, shared_b=True))
    check(products, target, cores=2)


@each_target
@pytest.mark.parametrize("dtype", HALVES)
def test_a_turned_product_in_half_precision_rounds_once(target, dtype):
    product, cpu = Matmul(70, 10, 90, True), CPU.of(target)
    dtypes = ["float32", "float32", dtype]

    def make():
        return matmul(product, cpu, way="turned")

    library = compile_kernels({"wide": make(), "half": stored_as(dtypes, 1, make)}, target)
    shapes = product.shapes()
    factors = [tvm.runtime.tensor(RNG.normal(size=shape).astype("float32")) for shape in shapes[:2]]
    wide, half = (tvm.runtime.empty(shapes[2], name) for name in ("float32", dtype))
    library["wide"](*factors, wide)
    library["half"](*factors, half)
    assert half.numpy().tobytes() == wide.numpy().astype(half.numpy().dtype).tobytes()


@pytest.mark.parametrize("cpu", [WIDE, replace(WIDE, tuning=ZEN4), NARROW], ids=str)
def test_products_that_are_turned(cpu):
    """Gradients of weights of few columns, and products of few results of long sums."""
    for size in [(1024, 10, 128), (907, 50, 2932), (300, 4, 64), (2048, 20, 256)]:
        assert is_transposed(Matmul(*size, True), cpu.tuning)
        assert is_transposed(Matmul(*size, True, True), cpu.tuning)
    assert is_transposed(Matmul(1000, 4, 512, False, True), cpu.tuning)


@pytest.mark.parametrize("cpu", [WIDE, replace(WIDE, tuning=ZEN4), NARROW], ids=str)
def test_products_that_are_not_turned(cpu):
    n = tirx.Var("n", "int32")
    wide = [(1024, 256, 128), (512, 64, 32), (1024, 129, 1024), (1, 10, 64), (64, 1, 64)]
    others = [Matmul(*size, True) for size in wide]
    # The transposition would take longer than the few steps.
    others.append(Matmul(2048, 10, 8, True))
    others += [Matmul(n, 10, 128, True), Matmul(1024, 10, 128, True, batch=4)]
    # The workspace would be large.
    others += [Matmul(200_000, 10, 128, True), Matmul(500_000, 4, 512, False, True)]
    others += [Matmul(1000, 20, 512), Matmul(1000, 4, 64, False, True)]
    assert not any(is_transposed(product, cpu.tuning) for product in others)


def test_a_product_that_is_turned_is_not_consumed():
    assert is_transposed(Matmul(1024, 10, 128, True), WIDE.tuning)
    assert not is_consumable(Matmul(1024, 10, 128, True), WIDE)
    assert is_consumable(Matmul(1024, 256, 128, True), WIDE)


def test_a_bias_is_not_added_to_a_turned_product():
    product = Matmul(1024, 10, 128, True)
    plain, biased = matmul(product, WIDE), matmul(product, WIDE, adds_bias=True)
    assert len(plain.params) == 3
    assert len(biased.params) == 4
    with pytest.raises(ValueError, match="turned"):
        matmul(product, WIDE, way="turned", adds_bias=True)


def test_symbolic_extents_are_not_turned_by_request():
    with pytest.raises(ValueError, match="turned"):
        matmul(Matmul(tirx.Var("n", "int32"), 10, 128), WIDE, way="turned")
