"""Adjoints of deeply nested expressions: their size and their values."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import tvm
from sweep import TARGET
from tensor_functions import check, tensor
from tvm import relax, tirx
from tvm.script import from_source

import relax_grad
from relax_grad.ir.compat import structural_walk
from relax_grad.ir.shared_values import PART, with_shared_values

pytestmark = pytest.mark.core

#: The depth of expressions that are compiled. TVM copies the arguments of functions, and takes
#: exponential time if they do not go through memory.
_DEPTH = 16

_SOURCE = """
@I.ir_module
class M:
    @T.prim_func(private=True, s_tir=True)
    def f(A: T.Buffer((8,), "float64"), Y: T.Buffer((8,), "float64")):
        for i in range(8):
            with T.sblock("b"):
                v = T.axis.spatial(8, i)
                Y[v] = VALUE
    @R.function
    def main(x: R.Tensor((8,), "float64")) -> R.Tensor((), "float64"):
        cls = M
        y = R.call_tir(cls.f, (x,), out_ty=R.Tensor((8,), "float64"))
        s = R.sum(y)
        return s
"""

_KINDS = {
    "a function": "T.tanh({} * A[v] + T.float64(0.5))",
    "a branch": "T.if_then_else(A[v] > 0.2, T.sin({}) * A[7 - v], T.exp({} * T.float64(0.1)))",
}


def _module(kind, depth):
    value = "A[v]"
    for _ in range(depth):
        value = _KINDS[kind].replace("{}", value)
    return from_source(_SOURCE.replace("VALUE", value))


def _size(module):
    return len(module.script())


@pytest.mark.parametrize("order", [1, 2, 3])
def test_the_size_is_linear_in_the_depth(order):
    depths = (2, 4, 8, 16)
    sizes = [
        _size(relax_grad.derivatives(_module("a function", depth), order=order)) for depth in depths
    ]
    for small, large in pairwise(sizes):
        assert large < 3 * small


@pytest.mark.parametrize("kind", _KINDS)
def test_values(kind):
    depth = _DEPTH if kind == "a function" else 3
    function = _module(kind, depth)["f"]
    check(function, [np.linspace(-0.9, 0.95, 8)], tensor(8))


@pytest.mark.parametrize("pipeline", ["default", "relax_grad"])
def test_second_order(pipeline):
    module = relax_grad.hvp(_module("a function", _DEPTH))
    target = TARGET if pipeline == "default" else relax_grad.target.host()
    compiled = tvm.compile(module, target, relax_pipeline=pipeline)
    x, tangent = np.linspace(-0.9, 0.95, 8), np.ones(8)
    vm = relax.VirtualMachine(compiled, tvm.cpu())
    results = vm["main_hvp"](tvm.runtime.tensor(x), tvm.runtime.tensor(tangent))

    def value(x):
        y = x
        for _ in range(_DEPTH):
            y = np.tanh(y * x + 0.5)
        return y

    step = 1e-4
    second = (value(x + step) - 2 * value(x) + value(x - step)) / step**2
    flat = [leaf.numpy() for leaf in _leaves(results) if leaf.numpy().shape == (8,)]
    assert any(np.allclose(leaf, second, rtol=1e-5, atol=1e-6) for leaf in flat)


@pytest.mark.parametrize("name", ["tanh", "tan", "atanh"])
def test_arguments_that_tvm_copies(name):
    """The forward function compiles, too, in our pipeline without a gradient."""
    value = "A[v]"
    for _ in range(_DEPTH):
        value = f"T.{name}({value} * T.float64(0.3) + A[v] * T.float64(0.3))"
    module = from_source(_SOURCE.replace("VALUE", value))
    compiled = tvm.compile(module, relax_grad.target.host(), relax_pipeline="relax_grad")
    x = np.linspace(-0.9, 0.95, 8)
    wanted = x
    for _ in range(_DEPTH):
        wanted = getattr(np, {"atanh": "arctanh"}.get(name, name))(wanted * 0.3 + x * 0.3)
    vm = relax.VirtualMachine(compiled, tvm.cpu())
    np.testing.assert_allclose(vm["main"](tvm.runtime.tensor(x)).numpy(), wanted.sum(), rtol=1e-10)


def test_a_load_stays_under_its_condition():
    """It may be out of bounds; parts that load nothing else leave the branch."""
    nested = {
        index: f"T.tanh(T.tanh(T.tanh({index} * {index} + T.float64(0.5))))"
        for index in ("A[v + 3]", "A[v]")
    }
    value = f"A[v] + T.if_then_else(v < 5, {nested['A[v + 3]']} * {nested['A[v]']}, A[v])"
    function = from_source(_SOURCE.replace("VALUE", value))["f"]
    stores = []
    structural_walk(with_shared_values(function.body), (tirx.BufferStore, stores.append))
    parts = [str(store.value) for store in stores if store.buffer.name == PART]
    assert parts
    assert all("v + 3" not in part for part in parts)
    check(function, [np.linspace(-0.9, 0.95, 8)], tensor(8))


def _leaves(value):
    if isinstance(value, tvm.runtime.Tensor):
        return [value]
    return [leaf for part in value for leaf in _leaves(part)]


def test_small_values_stay():
    x, y = (tirx.decl_buffer((8,), "float32", name, layout=None) for name in ("x", "y"))
    i = tirx.Var("i", "int32")
    load = tirx.BufferLoad(x, [i])
    part = tirx.tanh(load * load)
    store = tirx.BufferStore(y, part * part + part, [i])
    assert with_shared_values(store).same_as(store)
