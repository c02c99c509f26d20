"""Remainders by symbolic extents at several places of a function."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax

import relax_grad
from relax_grad.ir.remainders import with_truncated_remainders

pytestmark = pytest.mark.core

_SOURCE = """
@I.ir_module
class M:
    @T.prim_func(private=True, s_tir=True)
    def f(a: T.handle, p: T.handle, y: T.handle):
        n = T.int64()
        m = T.int64()
        A = T.match_buffer(a, (n,), "float64")
        P = T.match_buffer(p, (n,), "int64")
        Y = T.match_buffer(y, (m,), "float64")
        for i in range(m):
            with T.sblock("use"):
                v = T.axis.spatial(m, i)
                Y[v] = 0.5
                for j in range(2):
                    Y[v] = Y[v] * A[P[(n - v) % n]] + A[(n - v) % n] * A[((n - v) % n + 3 - v) % n]
                Y[v] = Y[v] + A[((n - v) // n) % n] * A[((n - v) % n + 3 - v) % n]
    @R.function
    def main(A: R.Tensor(("n",), "float64"), P: R.Tensor(("n",), "int64"),
             out: R.Tensor(("m",), "float64")) -> R.Tensor((), "float64"):
        n = T.int64()
        m = T.int64()
        cls = M
        y = R.call_tir(cls.f, (A, P), out_ty=R.Tensor((m,), "float64"))
        s = R.sum(R.multiply(y, out))
        return s
"""


def _expected(a, p, out):
    n, total = len(a), 0.0
    for v, factor in enumerate(out):
        y = 0.5
        for _ in range(2):
            y = y * a[p[(n - v) % n]] + a[(n - v) % n] * a[((n - v) % n + 3 - v) % n]
        total += factor * (y + a[((n - v) // n) % n] * a[((n - v) % n + 3 - v) % n])
    return total


def test_equal_remainders():
    module = relax_grad.value_and_grad(tvm.script.from_source(_SOURCE), wrt="A")
    assert with_truncated_remainders(module["f"]) is not module["f"]
    compiled = tvm.compile(module, relax_grad.target.host(), relax_pipeline="relax_grad")
    vm = relax.VirtualMachine(compiled, tvm.cpu())
    rng = np.random.default_rng(0)
    for n, m in ((4, 9), (1, 3), (7, 5)):
        a, p, out = rng.uniform(0.5, 1, n), rng.permutation(n), rng.normal(size=m)
        value, (gradient,) = vm["main_adjoint"](*map(tvm.runtime.tensor, (a, p, out)))
        np.testing.assert_allclose(value.numpy(), _expected(a, p, out))
        tangent = rng.normal(size=n)
        ends = (_expected(a + s * tangent, p, out) for s in (1e-6, -1e-6))
        slope = (next(ends) - next(ends)) / 2e-6
        np.testing.assert_allclose((gradient.numpy() * tangent).sum(), slope, rtol=1e-6)


def test_other_remainders_stay():
    x, y = (tvm.tirx.decl_buffer((8,), "int32", name, layout=None) for name in ("x", "y"))
    i, n = tvm.tirx.Var("i", "int32"), tvm.tirx.Var("n", "int32")
    once = tvm.tirx.BufferLoad(x, [(i - n) % n]) + (i - 3) % 5 + (i - 3) % 5
    loop = tvm.tirx.For(i, 0, 8, tvm.tirx.ForKind.SERIAL, tvm.tirx.BufferStore(y, once, [i]))
    function = tvm.tirx.PrimFunc([x, y, n], loop)
    assert with_truncated_remainders(function).same_as(function)
