"""The functions of the gates of recurrent layers against NumPy in float64."""

from __future__ import annotations

import numpy as np
import pytest
from machines import Run, each_target, run_kernels

from relax_grad.cpu.kernel.language import builder as b
from relax_grad.cpu.kernel.recurrent import gates
from relax_grad.cpu.target import CPU


def applied(name: str, x: np.ndarray, lanes: int):
    vectors = b.Vectors(lanes)
    function = getattr(gates, name)

    def body(taken, result) -> None:
        def apply(i, _) -> None:
            vectors.store(result, i, function(vectors, b.bind(vectors.load(taken, i))))

        vectors.each(x.size, apply)

    return b.prim_func(name, b.floats("xy", [x.shape, x.shape]), body)


def results(x: np.ndarray, target) -> tuple[np.ndarray, np.ndarray]:
    """Return the sigmoids and the hyperbolic tangents of numbers."""
    x = np.resize(x, -(-x.size // 16) * 16).astype("float32")
    names, lanes = ("sigmoid", "tanh"), CPU.of(target).lanes
    runs = [Run(applied(name, x, lanes), [x], [x.shape]) for name in names]
    (sigmoids,), (tangents,) = run_kernels(runs, target)
    return sigmoids, tangents


def errors(result: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Return errors in units in the last place."""
    return np.abs(result - exact) / np.spacing(np.abs(exact).astype("float32")).astype("float64")


@each_target
def test_accuracy(target):
    rng = np.random.default_rng(0)
    sizes = 10.0 ** rng.uniform(-37, 1, 32000)
    numbers = [np.linspace(-86, 86, 160001), rng.normal(size=160000) * 3, sizes, -sizes]
    x = np.concatenate(numbers).astype("float32")
    x = x[: x.size // 16 * 16]
    sigmoids, tangents = results(x, target)
    exact = x.astype("float64")
    has_fused = CPU.of(target).lanes > 4
    limits = 3 + np.abs(exact) / (16 if has_fused else 1)
    assert (errors(sigmoids, 1 / (1 + np.exp(-exact))) <= limits).all()
    assert (errors(tangents, np.tanh(exact)) <= (4 if has_fused else 6)).all()
    assert (np.abs(tangents) <= 1).all()
    assert (sigmoids <= 1).all()
    assert (sigmoids > 0).all()


@each_target
def test_edges(target):
    x = np.array([np.inf, 3e38, 100, 0, -0.0, -100, -3e38, -np.inf, np.nan], "float32")
    sigmoids, tangents = (values[: x.size] for values in results(x, target))
    np.testing.assert_array_equal(sigmoids[[0, 1, 2, 3, 4, 8]], [1, 1, 1, 0.5, 0.5, np.nan])
    assert (sigmoids[5:8] < 2e-38).all()
    np.testing.assert_array_equal(tangents, [1, 1, 1, 0, 0, -1, -1, -1, np.nan])


@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00001, 0x7FFFFFFF])
def test_every_nan_propagates(bits):
    target = {"kind": "llvm"}
    x = np.full(16, np.array(bits, "uint32").view("float32"))
    assert all(np.isnan(values).all() for values in results(x, target))
