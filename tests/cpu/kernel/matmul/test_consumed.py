"""Products that are not stored: each element is that of the kernel of the product, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from guard.consumed import consumer_of, shapes_of
from machines import WIDEST, Run, each_target, run_kernels
from processes import run_guard

from relax_grad.cpu.kernel.matmul.consumed import consumed, is_consumable
from relax_grad.cpu.kernel.matmul.matmul import Matmul, matmul
from relax_grad.cpu.target import CPU

RNG = np.random.default_rng(0)

#: Rows, columns and depths of whole and partial tiles and panels, of one task and of several.
SIZES = [(40, 2, 1), (33, 20, 7), (64, 64, 32), (90, 45, 129), (47, 2113, 3), (701, 66, 256)]
SIZES += [(300, 450, 7)]


def factors(product):
    return [RNG.normal(size=shape).astype("float32") for shape in product.shapes()[:2]]


@each_target
@pytest.mark.parametrize("cores", [1, 3])
def test_the_bits_of_the_stored_product(target, cores):
    cpu = replace(CPU.of(target), cores=cores)
    runs = []
    for i, size in enumerate(SIZES):
        product = Matmul(*size, transpose_a=i % 3 != 2, transpose_b=i % 3 == 0)
        assert is_consumable(product, cpu), product
        a, b = factors(product)
        x = RNG.normal(size=(product.rows, product.columns)).astype("float32")
        function = consumed(product, cpu, shapes_of(product), consumer_of(product))
        runs.append(Run(function, [a, b, x], [x.shape]))
        runs.append(Run(matmul(product, cpu, way="packed"), [a, b], [x.shape]))
    results = iter(run_kernels(runs, target))
    for run, own, stored in zip(runs[::2], results, results, strict=True):
        np.testing.assert_array_equal(own[0], stored[0] + run.inputs[2])


def test_products_that_are_not_consumable():
    cpu = CPU(16, 32, 2)
    assert is_consumable(Matmul(64, 64, 256), cpu)
    for product in (
        Matmul(64, 64, 257),  # sums in several parts
        Matmul(64, 1, 64),
        Matmul(8, 64, 64),  # whose second factor is read in place
        Matmul(64, 64, 64, batch=2),
    ):
        assert not is_consumable(product, cpu), product


def test_no_access_out_of_bounds():
    code, output, errors = run_guard("guard.consumed", WIDEST, SIZES)
    assert code == 0, errors[-2000:]
    assert output.splitlines() == [f"product{i}" for i in range(len(SIZES))]
