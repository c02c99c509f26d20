"""Casts of integers that TVM folds as C computes them."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import te, tirx

from relax_grad._compat import Analyzer, BufferLoad
from relax_grad.schedule._casts import with_folding_casts
from relax_grad.testing._program import without_assertions

INTEGERS = [f"{sign}{bits}" for sign in ("int", "uint") for bits in (8, 16, 32, 64)]

#: Every cast that has a value for every operand.
CASTS = [(source, dtype) for source in (*INTEGERS, "bool") for dtype in (*INTEGERS, "bool")]
CASTS += [("float32", "bool"), ("float32", "float16"), ("int64", "float32")]


def operands(dtype: str) -> np.ndarray:
    """Return numbers at which casts to other dtypes change, so many for every dtype."""
    if dtype == "bool":
        return np.array([False, True] * 4)
    if dtype == "float32":
        return np.array([0, -0.0, 0.5, -3, np.nan, np.inf, 1, 2], dtype)
    limits = np.iinfo(dtype)
    wanted = [int(limits.min), int(limits.max), -3, 0, 1, 200, 40000, 2**31]
    return np.array([value % 2**limits.bits for value in wanted], f"uint{limits.bits}").view(dtype)


@pytest.fixture(scope="module")
def functions():
    """One function for each cast."""

    def function(source, dtype):
        x = te.placeholder((8,), source, "x")
        found = te.create_prim_func([x, te.compute((8,), lambda i: tirx.Cast(dtype, x[i]))])
        return found.with_body(with_folding_casts(found.body))

    return {f"{source}_to_{dtype}": function(source, dtype) for source, dtype in CASTS}


def test_values(functions):
    module = {name: f.with_attr("global_symbol", name) for name, f in functions.items()}
    with without_assertions():
        compiled = tvm.compile(tvm.IRModule(module), "llvm")
    for source, dtype in CASTS:
        taken = operands(source)
        result = tvm.runtime.tensor(np.zeros(8, dtype))
        compiled[f"{source}_to_{dtype}"](tvm.runtime.tensor(taken), result)
        with np.errstate(invalid="ignore"):
            wanted = taken.astype(dtype)
        np.testing.assert_array_equal(result.numpy(), wanted, f"{source} to {dtype}")


def test_constants_are_folded(functions):
    """TVM raises no error for any constant, and what it folds is the same number."""
    folded = 0
    for source, dtype in CASTS:
        stores = []
        tvm_ffi.structural_walk(
            functions[f"{source}_to_{dtype}"].body, (tirx.BufferStore, stores.append)
        )
        (store,) = stores
        with np.errstate(invalid="ignore"):
            pairs = zip(operands(source), operands(source).astype(dtype), strict=True)
        for taken, wanted in pairs:
            if source == "float32" and not np.isfinite(taken):
                continue
            constant = tirx.const(taken.item(), source)
            value = tvm_ffi.structural_map(store.value, (BufferLoad, lambda _, c=constant: c))
            value = Analyzer().simplify(value)
            if isinstance(value, (tirx.IntImm, tirx.FloatImm)):
                folded += 1
                assert value.value == wanted, f"{taken} of {source} to {dtype}"
    assert folded > 300


def test_other_casts_are_left_as_they_are():
    i = tirx.Var("i", "int64")
    for cast in (
        tirx.Cast("int32", i),
        tirx.Cast("float32", i),
        tirx.Cast("uint8", tirx.Var("x", "float32")),
        tirx.Cast("int64", tirx.Var("x", "uint32")),
    ):
        assert with_folding_casts(cast).same_as(cast)
