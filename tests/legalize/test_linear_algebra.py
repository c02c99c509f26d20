"""Matrix products over an axis that is empty at run time, and in parts on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from calls import build, tensor
from sweep import TARGET
from tvm import relax, tirx
from tvm.relax import op

import relax_grad

M, N = (tirx.Var(name, "int64") for name in "mn")


def run(module, *values):
    """Run a module in TVM's default pipeline, in memory that held NaN before."""
    machine = relax.VirtualMachine(tvm.compile(module, TARGET), tvm.cpu())
    for _ in range(3):
        used = tvm.runtime.tensor(np.full((4, 5), np.nan, "float64"))
        results = machine["main"](*map(tvm.runtime.tensor, values))
        results = [
            result.numpy() for result in ([results] if hasattr(results, "numpy") else results)
        ]
        del used
    return results


def product(a, b, dtype="float32", out_dtype=None):
    params = [tensor("a", a, dtype), tensor("b", b, dtype)]
    return build(params, lambda a, b: op.matmul(a, b, out_dtype))


@pytest.mark.parametrize(
    ("dtype", "out_dtype"), [("float32", None), ("float64", None), ("float16", "float32")]
)
@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((4, N), (N, 5)),
        ((4, N), (M, 5)),
        ((N,), (N,)),
        ((N,), (N, 5)),
        ((4, N), (N,)),
        ((3, 1, 4, N), (2, N, 5)),
        ((N, N), (N, N)),
    ],
)
def test_product_over_an_empty_axis(a, b, dtype, out_dtype):
    module = product(a, b, dtype, out_dtype)
    for extent in (0, 3):
        values = [
            np.random.default_rng(0)
            .normal(size=[size if isinstance(size, int) else extent for size in shape])
            .astype(dtype)
            for shape in (a, b)
        ]
        (result,) = run(module, *values)
        np.testing.assert_allclose(result, np.matmul(*values, dtype=result.dtype), rtol=1e-5)


def test_gradient_over_an_empty_axis():
    """The gradient of a weight for a batch without rows is 0."""
    params = [tensor("x", (N, 3), "float32"), tensor("w", (3, 2), "float32")]
    module = build(params, lambda x, w: op.sum(op.matmul(x, w)))
    module = relax_grad.transform.Gradient("main")(module)
    module = tvm.IRModule({"main": module["main_adjoint"].with_attr("global_symbol", "main")})
    machine = relax.VirtualMachine(tvm.compile(module, TARGET), tvm.cpu())
    values = [np.zeros((0, 3), "float32"), np.ones((3, 2), "float32")]
    for _ in range(3):
        _, (of_x, of_w) = machine["main"](*map(tvm.runtime.tensor, values))
        assert of_x.shape == (0, 3)
        np.testing.assert_array_equal(of_w.numpy(), np.zeros((3, 2)))


@pytest.mark.parametrize(("a", "b"), [((4, 3), (3, 5)), ((4, N), (3, 5)), ((M, 3), (N, 5))])
def test_a_known_axis_is_left_to_tvm(a, b):
    functions = relax.transform.LegalizeOps()(product(a, b)).functions_items()
    assert sorted(variable.name_hint for variable, _ in functions) == ["main", "matmul"]


@pytest.mark.parametrize(
    ("dtype", "is_divided"), [("float32", True), ("float64", True), ("float16", False)]
)
def test_long_sums_are_divided_on_a_gpu(dtype, is_divided):
    """Products of half precision are left to tensor cores."""
    module = product((64, 4096), (4096, 64), dtype)
    with tvm.target.Target({"kind": "cuda", "arch": "sm_80"}):
        legalized = relax.transform.LegalizeOps()(module)
    names = {variable.name_hint for variable in legalized.get_global_vars()}
    assert ("matmul_parts" in names) == is_divided
