"""Error of float32 functions and of their derivatives, for docs/accuracy.md.

Each function and its gradient are compiled with the pipeline, and compared with PyTorch's in
float64 for numbers of every exponent and at the edges. Errors are in units in the last place.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import tvm
from _benchmark import Benchmark, facts, named
from tvm import relax
from tvm.relax import op

import relax_grad
from relax_grad.transform import Gradient

#: The distance between subnormal numbers.
LEAST = 2.0**-149

#: Points where a function saturates, is clamped, or changes its form: every float32 near these is
#: measured.
_PLACES = (
    *(0.125, 0.25, 0.5, 0.625, 0.7517915, 0.7524614, 1.0, 1.2784645, 2.0, 3.85, 3.9192059, 4.0),
    *(5.5, 9.01, 10.0, 10.9, 13.2, 14.2, 14.7, 17.3, 20.0, 87.33654, 88.72284, 89.41598),
    *(103.27893, 103.97208, 110.0, 112.0, math.log(2) / 2, math.pi / 2, math.pi),
)

_PYTORCH = torch.nn.functional


@dataclass(frozen=True)
class Function:
    """A scalar function.

    Attributes
    ----------
    op : Callable
        The operator of Relax.
    torch : Callable
        The function of PyTorch.
    exact : Callable, optional
        Returns ``(value, *derivatives)`` in float64, if PyTorch's float64 itself suffers from
        cancellation.
    slack : Callable, optional
        Returns for the arguments an absolute error of the derivatives that is accepted in addition
        to 4 units in the last place: a limit that the page on accuracy states.
    arguments : int
        The number of arguments.
    """

    op: Callable
    torch: Callable
    exact: Callable | None = None
    slack: Callable | None = None
    arguments: int = 1


def _normal_cdf(x: np.ndarray) -> np.ndarray:
    return np.vectorize(math.erfc, otypes=[float])(-x * math.sqrt(0.5)) / 2


def _gelu(x: np.ndarray):
    cdf = _normal_cdf(x)
    return x * cdf, cdf + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def _sigmoid(x: np.ndarray):
    """Return the sigmoids of x and of -x."""
    e = np.exp(-np.abs(x))
    return np.where(x < 0, e, 1) / (1 + e), np.where(x < 0, 1, e) / (1 + e)


def _gelu_tanh(x: np.ndarray):
    linear, cubic = 2 * math.sqrt(2 / math.pi), 0.044715
    share, rest = _sigmoid(linear * (x + cubic * x**3))
    return x * share, share + x * share * rest * linear * (1 + 3 * cubic * x * x)


def _silu(x: np.ndarray):
    share, rest = _sigmoid(x)
    return x * share, share + x * share * rest


FUNCTIONS = {
    "exp": Function(op.exp, torch.exp),
    "log": Function(op.log, torch.log),
    "power": Function(
        op.power,
        torch.pow,
        # The power in the product may be subnormal, with few digits, in PyTorch as well.
        slack=lambda x, y: (2 * np.abs(y) * LEAST, 2 * np.abs(np.log(np.abs(x))) * LEAST),
        arguments=2,
    ),
    "erf": Function(op.erf, torch.erf),
    "gelu": Function(op.nn.gelu, _PYTORCH.gelu, _gelu),
    "gelu_tanh": Function(op.nn.gelu_tanh, partial(_PYTORCH.gelu, approximate="tanh"), _gelu_tanh),
    "tanh": Function(
        op.tanh,
        torch.tanh,
        lambda x: (np.tanh(x), 1 / np.cosh(x) ** 2),
        # Computed from the rounded result: an error of an ulp of 1.
        slack=lambda x: (2.0**-22,),
    ),
    "sigmoid": Function(
        op.sigmoid,
        torch.sigmoid,
        lambda x: (_sigmoid(x)[0], _sigmoid(x)[0] * _sigmoid(x)[1]),
        slack=lambda x: (2.0**-22 * _sigmoid(x)[0],),
    ),
    "silu": Function(
        op.nn.silu,
        _PYTORCH.silu,
        _silu,
        # A difference of two numbers that are equal at the root of the derivative.
        slack=lambda x: (2.0**-22 * _sigmoid(x)[0],),
    ),
    "softplus": Function(lambda x: op.nn.softplus(x, 1.0, 20.0), _PYTORCH.softplus),
    "selu": Function(op.nn.selu, _PYTORCH.selu),
    "sqrt": Function(op.sqrt, torch.sqrt),
    "rsqrt": Function(
        op.rsqrt,
        torch.rsqrt,
        # The third power of the result, with three times its error.
        slack=lambda x: (2.0**-22 * np.abs(x) ** -1.5 / 2,),
    ),
    **{
        name: Function(getattr(op, name), getattr(torch, name))
        for name in (
            *("sin", "cos", "tan", "asin", "acos", "atan"),
            *("sinh", "cosh", "asinh", "acosh", "atanh"),
        )
    },
}


@dataclass(frozen=True)
class Found:
    """A function or a derivative of it at some numbers, and its errors.

    Attributes
    ----------
    values, exact, torch : np.ndarray
        The results of the pipeline's function, the exact ones in float64, and those of PyTorch in
        float32.
    errors, of_torch : np.ndarray
        The distances of the pipeline's values and of PyTorch's from the exact ones.
    beside_torch : np.ndarray
        The distances of the pipeline's values from PyTorch's.
    accepted : np.ndarray
        The slack of the function, in the same unit.
    """

    values: np.ndarray
    exact: np.ndarray
    torch: np.ndarray
    errors: np.ndarray
    of_torch: np.ndarray
    beside_torch: np.ndarray
    accepted: np.ndarray


def ulps(values: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Return the distances of float32 numbers from float64 ones, in units in the last place of the
    exact ones.

    The distance between a NaN and a number is infinite, and so is that between an infinite exact
    value and any other value. An infinite float32 counts as the power of 2 after the largest
    float32, with the sign of the infinity. Its distance is 0 if the exact value rounds to the same
    infinity.
    """
    with np.errstate(all="ignore"):
        rounded = exact.astype("float32")
        largest = np.finfo("float32").max
        unit = np.spacing(np.minimum(np.abs(rounded), largest)).astype("float64")
        finite = np.where(np.isinf(values), np.copysign(2.0**128, values), values.astype("float64"))
        distance = np.abs(finite - exact) / np.where(np.isnan(unit), 1, unit)
    distance[np.isinf(exact) & (values != exact)] = np.inf
    distance[(values == rounded) & np.isinf(rounded)] = 0
    distance[np.isnan(values) != np.isnan(exact)] = np.inf
    distance[np.isnan(values) & np.isnan(exact)] = 0
    return distance


def points(count: int, seed: int = 0) -> np.ndarray:
    """Return ``count`` numbers of each exponent and of each sign, and the numbers near the
    edges."""
    rng = np.random.default_rng(seed)
    ends = np.array([0, 1, 2, 2**22, 2**23 - 2, 2**23 - 1])
    fractions = np.concatenate(
        [np.tile(ends, (255, 1)), rng.integers(0, 2**23, (255, max(0, count - ends.size)))], 1
    )
    bits = (np.arange(255)[:, None] << 23) + fractions
    places = np.array(_PLACES, "float32").view("uint32").astype("int64")
    near = places[:, None] + np.arange(-4 * count, 4 * count)
    # In this range, functions are neither 0 nor constant.
    inside = np.linspace(0, 120, 250 * count)
    sizes = np.concatenate([bits.ravel(), near.ravel()]).astype("uint32").view("float32")
    sizes = np.concatenate([sizes, inside.astype("float32")])
    edges = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0], "float32")
    return np.concatenate([sizes, -sizes, edges])


def pairs(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return bases of every binary exponent with special exponents, and pairs with finite
    powers."""
    rng = np.random.default_rng(seed)
    special = [0, 0.5, 1, 2, 3, 1 / 3, 1.5, 10.1, 127.3, 1e-3, 1e-40, 2**24, 2**24 + 2, 2**23 - 0.5]
    special = np.array([*special, 3e38, np.inf, np.nan], "float32")
    bases = (np.arange(255)[:, None] << 23) + rng.integers(0, 2**23, (255, max(1, count // 16)))
    bases = bases.ravel().astype("uint32").view("float32")
    edges = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 1, -1], "float32")
    x, y = np.meshgrid(np.concatenate([bases, -bases, edges]), np.concatenate([special, -special]))
    size = rng.integers(1, 0x7F800000, 1000 * count).astype("uint32").view("float32")
    near_1 = rng.uniform(0.5, 2, 1000 * count).astype("float32")
    more = np.concatenate([size, near_1]).astype("float64")
    with np.errstate(divide="ignore"):
        exponents = rng.uniform(-152, 130, more.size) / np.log2(more)
    x = np.concatenate([x.ravel(), more.astype("float32")])
    return x, np.concatenate([y.ravel(), exponents.astype("float32")])


def measure(name: str, count: int, length: int | None = None) -> Iterator[tuple[str, Found]]:
    """Yield the names of a function and its derivatives, with their errors.

    Parameters
    ----------
    name : str
        A function of :data:`FUNCTIONS`.
    count : int
        The count of numbers of each exponent.
    length : int, optional
        The count of numbers to take, from the end: fewer than fill a vector. By default all.
    """
    function = FUNCTIONS[name]
    inputs = pairs(count) if function.arguments == 2 else (points(count),)
    inputs = [array[-length:] if length else array for array in inputs]
    results = _results(function, inputs)
    with np.errstate(all="ignore"):
        wide = [array.astype("float64") for array in inputs]
        exact = _of_torch(function, wide) if function.exact is None else function.exact(*wide)
        slack = (0.0, *(function.slack(*wide) if function.slack else [0.0] * len(inputs)))
        theirs = _of_torch(function, inputs)
        names = (
            "value",
            *(f"gradient {i}" if len(inputs) > 1 else "gradient" for i in range(len(inputs))),
        )
        for kind, ours, wanted, torchs, extra in zip(
            names, results, exact, theirs, slack, strict=True
        ):
            unit = np.spacing(np.abs(wanted.astype("float32"))).astype("float64")
            accepted = np.broadcast_to(
                np.nan_to_num(extra / unit, nan=0.0, posinf=0.0), wanted.shape
            )
            errors = (
                ulps(ours, wanted),
                ulps(torchs, wanted),
                ulps(ours, torchs.astype("float64")),
            )
            yield kind, Found(ours, wanted, torchs, *errors, accepted)


def _results(function: Function, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """Return the values and the derivatives from the pipeline's functions."""

    def module(body: Callable) -> tvm.IRModule:
        params = [
            relax.Var(f"x{i}", relax.TensorType(array.shape, "float32"))
            for i, array in enumerate(inputs)
        ]
        builder = relax.BlockBuilder()
        with builder.function("main", params):
            with builder.dataflow():
                result = builder.emit_output(body(*params))
            builder.emit_func_output(result)
        return builder.get()

    adjoint = Gradient("main")(module(lambda *args: op.sum(function.op(*args))))
    functions = {"value": module(function.op)["main"], "gradients": adjoint["main_adjoint"]}
    functions = {name: prim.with_attr("global_symbol", name) for name, prim in functions.items()}
    executable = tvm.compile(
        tvm.IRModule(functions), relax_grad.target.host(), relax_pipeline="relax_grad"
    )
    machine = relax.VirtualMachine(executable, tvm.cpu())
    tensors = [tvm.runtime.tensor(array) for array in inputs]
    gradients = machine["gradients"](*tensors)[1]
    return [tensor.numpy() for tensor in (machine["value"](*tensors), *gradients)]


def _of_torch(function: Function, inputs: list[np.ndarray]) -> list[np.ndarray]:
    tensors = [torch.tensor(array, requires_grad=True) for array in inputs]
    value = function.torch(*tensors)
    gradients = torch.autograd.grad(value.sum(), tensors)
    return [tensor.detach().numpy() for tensor in (value, *gradients)]


def _largest(errors: np.ndarray, measured: Found) -> float | None:
    """Return the largest error with three digits, or None, which JSON supports, for infinity."""
    largest = float(f"{errors[~np.isnan(measured.exact)].max():.3g}")
    return largest if math.isfinite(largest) else None


def measured(name: str, args: Namespace) -> dict:
    """Return the largest errors of a function and of its derivatives, and PyTorch's."""
    return {
        kind: {"relax_grad": _largest(own.errors, own), "torch": _largest(own.of_torch, own)}
        for kind, own in measure(name, args.count)
    }


BENCHMARK = Benchmark(
    rows=lambda args: {name: name for name in FUNCTIONS},
    measure=measured,
    json="functions.json",
    head=lambda args: {
        "about": {**facts("processor", "python", "tvm", "torch"), "count": args.count}
    },
    layout=named("errors"),
    options={
        "--count": {
            "type": int,
            "default": 1024,
            "help": "numbers of each exponent (default: 1024)",
        }
    },
)
