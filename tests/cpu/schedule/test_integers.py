"""Integer operations that TVM folds to the values that C computes."""

from __future__ import annotations

import itertools
import operator

import numpy as np
import pytest
import tvm
import tvm_ffi
from sweep import TARGET
from tvm import te, tirx

from relax_grad.cpu.schedule import schedule
from relax_grad.cpu.schedule._integers import with_folding_integers
from relax_grad.cpu.target import CPU
from relax_grad.ir.compat import Analyzer, BufferLoad
from relax_grad.testing._program import without_assertions

INTEGERS = [f"{sign}{bits}" for sign in ("int", "uint") for bits in (8, 16, 32, 64)]

#: Every cast that is defined for all operands.
CASTS = [(source, dtype) for source in (*INTEGERS, "bool") for dtype in (*INTEGERS, "bool")]
CASTS += [("float32", "bool"), ("float32", "float16"), ("int64", "float32")]


def operands(dtype: str) -> np.ndarray:
    """Return 8 numbers, including those at which casts to other dtypes change the value."""
    if dtype == "bool":
        return np.array([False, True] * 4)
    if dtype == "float32":
        return np.array([0, -0.0, 0.5, -3, np.nan, np.inf, 1, 2], dtype)
    limits = np.iinfo(dtype)
    wanted = [int(limits.min), int(limits.max), -3, 0, 1, 200, 40000, 2**31]
    return np.array([value % 2**limits.bits for value in wanted], f"uint{limits.bits}").view(dtype)


@pytest.fixture(scope="module")
def functions():
    """Return one function for each cast."""

    def function(source, dtype):
        x = te.placeholder((8,), source, "x")
        prim = te.create_prim_func([x, te.compute((8,), lambda i: tirx.Cast(dtype, x[i]))])
        return prim.with_body(with_folding_integers(prim.body))

    return {f"{source}_to_{dtype}": function(source, dtype) for source, dtype in CASTS}


def test_values(functions):
    module = {name: f.with_attr("global_symbol", name) for name, f in functions.items()}
    with without_assertions():
        compiled = tvm.compile(tvm.IRModule(module), TARGET)
    for source, dtype in CASTS:
        taken = operands(source)
        result = tvm.runtime.tensor(np.zeros(8, dtype))
        compiled[f"{source}_to_{dtype}"](tvm.runtime.tensor(taken), result)
        with np.errstate(invalid="ignore"):
            wanted = taken.astype(dtype)
        np.testing.assert_array_equal(result.numpy(), wanted, f"{source} to {dtype}")


def test_constants_are_folded(functions):
    """TVM raises no error for any constant, and folds it to the computed value."""
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
        assert with_folding_integers(cast).same_as(cast)


COMPARISONS = [getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")]
OPERATIONS = {
    operator.sub: operator.sub,
    tirx.min: np.minimum,
    tirx.max: np.maximum,
    **dict(zip(COMPARISONS, COMPARISONS, strict=True)),
}


def operated(operation, a, b):
    """Return the tensor of an operation on two tensors."""
    return te.compute([4], lambda i: operation(a[i], b[i]).astype(a.dtype))


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64"])
@pytest.mark.parametrize("number", [0, 1, 200])
def test_operations_on_unsigned_constants(number, dtype):
    """A producer stores a constant in some or all elements, and the consumer subtracts or compares
    it."""
    taken = np.array([0, 1, 199, np.iinfo(dtype).max], dtype)
    x, constant = te.placeholder([4], dtype), tirx.const(number, dtype)
    whole = te.compute([4], lambda _: constant)
    partial = te.compute([4], lambda i: tirx.Select(i < 1, constant, x[i]))
    full = np.full(4, number, dtype)
    values = [(x, taken), (whole, full), (partial, np.where(np.arange(4) < 1, full, taken))]
    results, wanted = [], []
    for (a, first), (b, second) in itertools.product(values, repeat=2):
        results += [operated(operation, a, b) for operation in OPERATIONS]
        wanted += [operation(first, second).astype(dtype) for operation in OPERATIONS.values()]
    function = schedule(te.create_prim_func([x, *results]), CPU(4, 16, 2))
    assert "alloc_buffer" not in function.script()
    with without_assertions():
        compiled = tvm.compile(function.with_attr("global_symbol", "main"), TARGET)
    outputs = [tvm.runtime.tensor(np.full(4, 99, dtype)) for _ in results]
    compiled["main"](tvm.runtime.tensor(taken), *outputs)
    for i, (result, expected) in enumerate(zip(outputs, wanted, strict=True)):
        np.testing.assert_array_equal(result.numpy(), expected, str(i))


def test_nested_differences_do_not_grow():
    """Each pair of inverse reinterpretations is dropped. Otherwise each difference would double the
    operands."""
    names = [tirx.Var(f"x{i}", "uint64") for i in range(20)]
    expr = names[0]
    for name in names[1:]:
        expr = name - expr
    assert len(str(with_folding_integers(expr))) < 5000
