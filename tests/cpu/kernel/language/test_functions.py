"""Elementary functions against PyTorch's in float64."""

from __future__ import annotations

import numpy as np
import pytest
from machines import Run, each_target, run_kernels
from tvm import te, topi

from relax_grad.cpu.kernel.language import activations as activations
from relax_grad.cpu.kernel.language import builder as b
from relax_grad.cpu.kernel.language import functions as math
from relax_grad.cpu.schedule import schedule
from relax_grad.cpu.target import CPU

torch = pytest.importorskip("torch", reason="PyTorch is not installed: nothing to compare with")

FUNCTIONS = {
    "exp": torch.exp,
    "erf": torch.erf,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "log": torch.log,
    "expm1": torch.expm1,
    "atanh": torch.atanh,
    "normal_cdf": lambda x: torch.erfc(-x * np.sqrt(0.5)) / 2,
    "gelu": lambda x: x * torch.erfc(-x * np.sqrt(0.5)) / 2,
    "gelu_slope": lambda x: (
        torch.erfc(-x * np.sqrt(0.5)) / 2 + x * (-x * x / 2).exp() / np.sqrt(2 * np.pi)
    ),
    "gelu_tanh": lambda x: x * torch.sigmoid(LINEAR * (x + 0.044715 * x**3)),
    "silu": lambda x: x * torch.sigmoid(x),
    "silu_slope": lambda x: _silu_slope(x),
    "softplus": lambda x: x.clamp(min=0) + torch.log1p(torch.exp(-x.abs())),
}


def _silu_slope(x):
    """Return the derivative of silu."""
    tail = torch.exp(-x.abs())
    slope = tail * (1 + tail - x.abs()) / (1 + tail) ** 2
    return torch.where(x < 0, slope, 1 - slope)


LINEAR = 2 * np.sqrt(2 / np.pi)

#: The results whose unit in the last place is the least that counts, for functions that cancel
#: around a root.
LEAST = {"silu_slope": 0.03}

#: Error bounds in units in the last place; the larger one holds without fused multiply-add
#: instructions.
LIMIT, LIMIT_OF_SSE = 4.0, 6.0

LEAST_NORMAL = 2.0**-126


def everywhere() -> np.ndarray:
    """Return numbers of all magnitudes, with infinities and NaN."""
    sizes = 10.0 ** np.linspace(-44, 38.5, 20000)
    edges = [0.0, -0.0, np.inf, -np.inf, np.nan]
    numbers = np.concatenate([np.linspace(-105, 90, 100001), sizes, -sizes, edges])
    return np.resize(numbers, -(-numbers.size // 16) * 16).astype("float32")


def applied(name, x, lanes):
    vectors = b.Vectors(lanes)
    function = getattr(activations if hasattr(activations, name) else math, name)

    def body(taken, result) -> None:
        vectors.each(
            x.size,
            lambda i, _: vectors.store(result, i, function(b.bind(vectors.load(taken, i)))),
        )

    return b.prim_func(name, [(param, [x.size], "float32") for param in ("x", "y")], body)


@each_target
@pytest.mark.parametrize("name", FUNCTIONS)
def test_accuracy(target, name):
    x = everywhere()
    run = Run(applied(name, x, CPU.of(target).lanes), [x], [x.shape])
    ((result,),) = run_kernels([run], target)
    exact = FUNCTIONS[name](torch.from_numpy(x).double()).numpy()
    with np.errstate(over="ignore"):
        rounded = exact.astype("float32")
    assert np.array_equal(np.isnan(result), np.isnan(exact))
    assert np.array_equal(np.isinf(result), np.isinf(rounded))
    finite = np.isfinite(rounded)
    is_far = np.abs(x[finite]) > 2  # from a root
    size = np.where(is_far, 0, LEAST.get(name, 0)).astype("float32")
    unit = np.spacing(np.maximum(np.abs(rounded[finite]), size)).astype("float64")
    error = np.abs(result[finite] - exact[finite]) / unit
    is_sse = CPU.of(target).lanes == 4
    assert error.max() <= (LIMIT_OF_SSE if is_sse else LIMIT)


@each_target
def test_erf_is_1_beyond_saturation(target):
    sizes = np.array([3.93, 4.0, 5.0, 1e2, 1e10, 3e38, np.inf, np.nan], "float32")
    x = np.concatenate([sizes, -sizes])
    run = Run(applied("erf", x, CPU.of(target).lanes), [x], [x.shape])
    ((result,),) = run_kernels([run], target)
    np.testing.assert_array_equal(result, [*[1] * 7, np.nan, *[-1] * 7, np.nan])


@each_target
def test_exp_or_0(target):
    """Results that would be subnormal are 0 or right."""
    x = np.concatenate([np.linspace(-105, 88, 100003), [-1e30, -np.inf, np.nan, 0.0, -3.4e38]])
    x = np.resize(x, -(-x.size // 16) * 16).astype("float32")
    run = Run(applied("exp_or_0", x, CPU.of(target).lanes), [x], [x.shape])
    ((result,),) = run_kernels([run], target)
    exact = np.exp(x.astype("float64"))
    assert np.array_equal(np.isnan(result), np.isnan(exact))
    unit = np.spacing(exact.astype("float32")).astype("float64")
    is_right = np.abs(result - exact) / unit <= LIMIT
    assert is_right[exact >= LEAST_NORMAL].all()
    assert (is_right | (result == 0))[exact < LEAST_NORMAL].all()


@each_target
def test_log1p(target):
    x = np.concatenate([np.linspace(0, 1, 100003), 10.0 ** np.linspace(-44, 37, 20000), [np.nan]])
    x = np.resize(x, -(-x.size // 16) * 16).astype("float32")
    run = Run(applied("log1p", x, CPU.of(target).lanes), [x], [x.shape])
    ((result,),) = run_kernels([run], target)
    exact = np.log1p(x.astype("float64"))
    unit = np.spacing(exact.astype("float32")).astype("float64")
    assert np.array_equal(np.isnan(result), np.isnan(exact))
    assert np.nanmax(np.abs(result - exact) / unit) <= LIMIT


def powers() -> tuple[np.ndarray, np.ndarray]:
    """Return all pairs of special values, and many other pairs."""
    rng = np.random.default_rng(0)
    special = [0.0, 1.0, np.inf, 0.5, 2.0, 3.0, 1.5, 1e-40, 1e-45, 1e30, 16777217.0, 1 - 2**-24]
    special = np.array([np.nan, *special, *(-value for value in special)], "float32")
    pairs = [axis.ravel() for axis in np.meshgrid(special, special)]
    sizes = 10.0 ** rng.uniform(-44, 38.5, 20000)
    x = np.concatenate([sizes, rng.uniform(0.5, 2, 20000), -rng.uniform(0, 9, 5000)])
    y = np.concatenate(
        [rng.normal(size=20000), rng.normal(0, 60, 20000), rng.integers(-40, 40, 5000)]
    )
    both = [np.concatenate(parts).astype("float32") for parts in zip(pairs, (x, y), strict=True)]
    return tuple(np.resize(values, -(-values.size // 16) * 16) for values in both)


@each_target
def test_powers(target):
    x, y = powers()
    taken = [te.placeholder(x.shape, "float32", name) for name in "xy"]
    function = schedule(te.create_prim_func([*taken, topi.power(*taken)]), CPU.of(target))
    ((result,),) = run_kernels([Run(function, [x, y], [x.shape])], target)
    exact = torch.pow(*(torch.from_numpy(array).double() for array in (x, y))).numpy()
    with np.errstate(over="ignore"):
        rounded = exact.astype("float32")
    assert np.array_equal(np.isnan(result), np.isnan(exact))
    assert np.array_equal(np.signbit(result), np.signbit(rounded) & ~np.isnan(exact))
    assert np.array_equal(np.isinf(result), np.isinf(rounded))
    finite = np.isfinite(rounded)
    size = np.maximum(np.abs(exact[finite]), LEAST_NORMAL)
    assert (np.abs(result[finite] - exact[finite]) / size).max() < 2.4e-7
