"""Derivatives up to order 3 at the edges of functions: finite where PyTorch's are.

A rule that selects a value computes the branch that is not taken too. In a higher order its
infinity is multiplied by 0, and the result is NaN.
"""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from sweep import TARGET
from tvm import relax
from tvm.relax import op

import relax_grad

torch = pytest.importorskip("torch")
_torch_nn = torch.nn.functional

pytestmark = pytest.mark.core

_POINTS = np.array([0.0, 1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 40.0, -40.0])


def _constant(value):
    return relax.const(value, "float64")


def _guarded_root(x):
    is_positive = op.greater(x, _constant(0.0))
    return op.where(is_positive, op.sqrt(op.where(is_positive, x, _constant(1.0))), _constant(0.0))


def _torch_power(k):
    return lambda x: torch.pow(x, k)


_UNARY = (
    *("abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "erf", "exp"),
    *("log", "negative", "rsqrt", "sigmoid", "sin", "sinh", "sqrt", "square", "tan", "tanh"),
)

#: Relax function and PyTorch function, by name.
_FUNCTIONS = {name: (getattr(op, name), getattr(torch, name)) for name in _UNARY}
_FUNCTIONS |= {
    f"power {k}": (lambda x, k=k: op.power(x, _constant(k)), _torch_power(k))
    for k in (0.0, 1.0, 2.0, 3.0, 0.5, -1.0)
}
_FUNCTIONS |= {
    "power of 2": (lambda x: op.power(_constant(2.0), x), lambda x: torch.pow(2.0, x)),
    "power of 0": (lambda x: op.power(_constant(0.0), x * x), lambda x: torch.pow(x * 0, x * x)),
    "atan2": (lambda x: op.atan2(x, _constant(0.5)), lambda x: torch.atan2(x, x * 0 + 0.5)),
    "divide": (lambda x: op.divide(x, x * x + _constant(1.0)), lambda x: x / (x * x + 1)),
    "log_add_exp": (
        lambda x: op.log_add_exp(x, _constant(0.5)),
        lambda x: torch.logaddexp(x, x * 0 + 0.5),
    ),
    "relu": (op.nn.relu, torch.relu),
    "leakyrelu": (lambda x: op.nn.leakyrelu(x, 0.1), lambda x: _torch_nn.leaky_relu(x, 0.1)),
    "silu": (op.nn.silu, _torch_nn.silu),
    "gelu": (op.nn.gelu, _torch_nn.gelu),
    "gelu_tanh": (op.nn.gelu_tanh, lambda x: _torch_nn.gelu(x, approximate="tanh")),
    "softplus": (op.nn.softplus, lambda x: _torch_nn.softplus(x, threshold=1e9)),
    "clip": (lambda x: op.clip(x, -1, 1), lambda x: torch.clamp(x, -1, 1)),
    "where": (_guarded_root, lambda x: torch.where(x > 0, torch.where(x > 0, x, 1).sqrt(), 0)),
    "prod": (lambda x: op.prod(x, axis=0), lambda x: x.prod()),
    "cumprod": (lambda x: op.cumprod(x, axis=0), lambda x: torch.cumprod(x, 0)),
}


@pytest.fixture(scope="module")
def derivatives():
    """The derivatives of each function along ones at the points, by order."""
    x = relax.Var("x", relax.TensorType((len(_FUNCTIONS), len(_POINTS)), "float64"))
    bb = relax.BlockBuilder()
    with bb.function("main", [x]):
        rows = bb.emit(op.split(x, len(_FUNCTIONS), axis=0))
        total = None
        for i, (function, _) in enumerate(_FUNCTIONS.values()):
            row = bb.emit(op.reshape(rows[i], (len(_POINTS),)))
            value = bb.emit(op.sum(function(row)))
            total = value if total is None else bb.emit(total + value)
        bb.emit_func_output(total)
    module = relax_grad.derivatives(bb.get(), order=3)
    vm = relax.VirtualMachine(tvm.compile(module, TARGET), tvm.cpu())
    value = np.tile(_POINTS, (len(_FUNCTIONS), 1))
    ones = np.ones_like(value)
    results = vm["main_order3"](*map(tvm.runtime.tensor, (value, ones, ones)))
    return [part[0].numpy() for part in list(results)[1:]]


@pytest.mark.parametrize("name", _FUNCTIONS)
def test_finite_where_torch_is(name, derivatives):
    function = _FUNCTIONS[name][1]
    x = torch.tensor(_POINTS, requires_grad=True)
    total = function(x).sum()
    for order, found in enumerate(derivatives, 1):
        is_constant = not total.requires_grad
        total = x * 0 if is_constant else torch.autograd.grad(total, x, create_graph=True)[0]
        wanted = total.detach().numpy(force=True)
        got = found[list(_FUNCTIONS).index(name)]
        at = np.isfinite(wanted)
        np.testing.assert_allclose(got[at], wanted[at], rtol=1e-6, atol=1e-9, err_msg=str(order))
        total = total.sum()
