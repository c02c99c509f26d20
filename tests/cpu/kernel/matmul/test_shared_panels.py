"""Products that pack their second factor for others, and products of packed panels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import Run, each_target, largest_error, run_kernels
from sweep import at_length, batches
from tvm import tirx

from relax_grad.cpu.kernel.matmul.matmul import Matmul, matmul
from relax_grad.cpu.kernel.matmul.shared_panels import (
    fewest_sharing,
    matmul_of_panels,
    matmul_with_panels,
    packed,
    panels_shape,
)
from relax_grad.cpu.target import CPU

RNG = np.random.default_rng(0)


def check(products, target, **properties):
    """Compare both kernels of products with NumPy, bit for bit with each other and with the kernel
    that packs its factor itself."""
    cpu, runs, wanted = replace(CPU.of(target), **properties), [], []
    for product in products:
        shapes, panels = product.shapes(), panels_shape(product, cpu)
        a, b = (RNG.normal(size=shape).astype("float32") for shape in shapes[:2])
        matrix = b.T if product.transpose_b else b
        copy = packed(matrix, panels)
        first = matmul_with_panels(product, cpu, shapes)
        later = matmul_of_panels(product, cpu, [shapes[0], panels, shapes[2]])
        runs.append(Run(first, [a, b], [shapes[2], panels]))
        runs.append(Run(later, [a, copy], [shapes[2]]))
        runs.append(Run(matmul(product, cpu, way="packed"), [a, b], [shapes[2]]))
        wanted.append((product, a.astype("float64") @ matrix, copy))
    results = iter(run_kernels(runs, target))
    firsts = []
    for (product, exact, copy), first, later, plain in zip(
        wanted, results, results, results, strict=True
    ):
        assert largest_error(first[0], exact) < 2e-6, product
        assert np.array_equal(columns_of(first[1], product), columns_of(copy, product)), product
        assert np.array_equal(first[0], later[0]), product
        assert np.array_equal(first[0], plain[0]), product
        firsts.append(first[0])
    return firsts


def columns_of(panels, product):
    """Return the columns of panels that exist: the others are free, and no result reads them."""
    number, depth, width = panels.shape
    return panels.transpose(1, 0, 2).reshape(depth, number * width)[:, : product.columns]


@each_target
@pytest.mark.parametrize("transpose_b", [False, True])
def test_sizes_around_the_tile(target, transpose_b):
    """Rows that are copied, several stretches of k, partial panels and strips, and panels with
    whole vectors beyond the columns (of 4, 8 and 16 lanes)."""
    sizes = [(10, 32, 16), (21, 45, 70), (33, 70, 600), (40, 131, 512), (1, 33, 1), (128, 96, 257)]
    sizes += [(9, 20, 12), (9, 24, 12), (9, 80, 12)]
    check([Matmul(*size, transpose_b=transpose_b) for size in sizes], target)


@each_target
def test_panels_of_a_large_factor_are_prefetched(target):
    """They come from distant caches; those of a small factor stay in a near one."""
    large, small = Matmul(40, 1100, 250, transpose_b=True), Matmul(40, 500, 250)
    check([large, Matmul(40, 600, 700)], target)
    cpu = CPU.of(target)
    for product in (large, small):
        shape_a, _, shape_c = product.shapes()
        shapes = [shape_a, panels_shape(product, cpu), shape_c]
        script = matmul_of_panels(product, cpu, shapes).script()
        assert ("prefetch" in script) == (product is large)


@each_target
@pytest.mark.parametrize("size", [(61, 150, 300), (60, 70, 1300)])
def test_any_number_of_tasks_gives_the_same_bits(target, size):
    """In one part of k, and in several."""
    product = Matmul(*size, transpose_b=True)
    a, b = (RNG.normal(size=shape).astype("float32") for shape in product.shapes()[:2])
    runs = []
    for cores in (1, 2, 3, 16):
        cpu = replace(CPU.of(target), cores=cores)
        shapes = [*product.shapes(), panels_shape(product, cpu)]
        runs.append(Run(matmul_with_panels(product, cpu, shapes[:3]), [a, b], shapes[2:]))
    results = run_kernels(runs, target)
    wanted, first = results[0]
    for result, panels in results[1:]:
        assert np.array_equal(result, wanted)
        assert np.array_equal(columns_of(panels, product), columns_of(first, product))


@each_target
@pytest.mark.slow
@at_length(36, 12)
@given(cases=batches(st.tuples(*[st.integers(1, 150)] * 3, st.booleans()), 12))
def test_any_product(target, cases):
    check([Matmul(*size, transpose_b=turned) for *size, turned in cases], target, cores=3)


def test_the_number_of_products_that_share():
    wide, narrow = CPU(16, 32, 2), CPU(8, 16, 2)
    for cpu in (wide, narrow):
        assert fewest_sharing(Matmul(64, 256, 128), cpu) == 4
        assert fewest_sharing(Matmul(64, 256, 128, transpose_b=True), cpu) == 4
        # Many rows; a narrow factor; rows that are columns; a batch; a symbolic extent; rows that
        # are read in place.
        for product in (
            Matmul(129, 256, 128),
            Matmul(64, 31, 128),
            Matmul(64, 256, 128, transpose_a=True),
            Matmul(64, 256, 128, batch=2),
            Matmul(tirx.Var("rows", "int32"), 256, 128),
            Matmul(16, 256, 128),
            Matmul(4, 256, 1024, transpose_b=True),
        ):
            assert fewest_sharing(product, cpu) is None
    # Vectors along k, whose lanes are summed, keep fewer registers as busy.
    assert fewest_sharing(Matmul(16, 256, 1024, transpose_b=True), wide) == 8
    assert fewest_sharing(Matmul(16, 256, 1024, transpose_b=True), narrow) is None
