"""Floating-point operations that TVM's simplifier takes for operations of real numbers."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.relax import op

import relax_grad
from relax_grad.ir.compat import Analyzer
from relax_grad.ir.floats import with_guarded_floats, without_guards

NUMBERS = [np.nan, np.inf, -np.inf, 0.0, 1.0, -1.5, 1e30, -3e-9]


def _number(value, dtype):
    return relax.const(value, dtype)


#: Functions of two tensors and the dtype, by operators of Relax, with those of NumPy.
FUNCTIONS = {
    "equal": (lambda x, y, k: op.equal(x, x), lambda x, y: x == x),
    "not less": (lambda x, y, k: op.logical_not(op.less(x, y)), lambda x, y: ~(x < y)),
    "not at least": (
        lambda x, y, k: op.logical_not(op.greater_equal(x, y)),
        lambda x, y: ~(x >= y),
    ),
    "neither": (
        lambda x, y, k: op.logical_not(op.logical_or(op.less(x, y), op.less(y, x))),
        lambda x, y: ~((x < y) | (y < x)),
    ),
    "either": (
        lambda x, y, k: op.logical_or(op.less(x, y), op.greater_equal(x, y)),
        lambda x, y: (x < y) | (x >= y),
    ),
    "both": (
        lambda x, y, k: op.logical_and(op.less(x, y), op.greater_equal(x, y)),
        lambda x, y: (x < y) & (x >= y),
    ),
    "rounded": (
        lambda x, y, k: op.subtract(op.add(x, _number(1e8, k)), _number(1e8, k)),
        lambda x, y: (x + x.dtype.type(1e8)) - x.dtype.type(1e8),
    ),
    "rest": (lambda x, y, k: op.subtract(x, op.add(x, y)), lambda x, y: x - (x + y)),
    "sum of errors": (
        lambda x, y, k: op.subtract(op.subtract(op.add(x, y), x), y),
        lambda x, y: ((x + y) - x) - y,
    ),
    "selected": (
        lambda x, y, k: op.where(op.equal(x, x), x, _number(7, k)),
        lambda x, y: np.where(x == x, x, x.dtype.type(7)),
    ),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_functions_have_the_bits_of_numpy(dtype):
    kind = relax.TensorType((64,), dtype)
    x, y = relax.Var("x", kind), relax.Var("y", kind)
    bb = relax.BlockBuilder()
    with bb.function("main", [x, y]):
        with bb.dataflow():
            results = [bb.emit(f(x, y, dtype)) for f, _ in FUNCTIONS.values()]
            output = bb.emit_output(relax.Tuple(results))
        bb.emit_func_output(output)
    built = tvm.compile(bb.get(), relax_grad.target.host(), relax_pipeline="relax_grad")
    values = [np.array(part, dtype) for part in (np.repeat(NUMBERS, 8), np.tile(NUMBERS, 8))]
    machine = relax.VirtualMachine(built, tvm.cpu())
    with np.errstate(all="ignore"):
        for (name, (_, wanted)), result in zip(
            FUNCTIONS.items(), machine["main"](*map(tvm.runtime.tensor, values)), strict=True
        ):
            np.testing.assert_array_equal(result.numpy(), wanted(*values), name)


def test_the_simplifier_keeps_guarded_operations():
    """It still simplifies integers."""
    buffer = tvm.tirx.decl_buffer((8,), "float32")
    i = tvm.tirx.Var("i", "int64")
    value = tvm.tirx.BufferLoad(buffer, [i + 1 - 1])
    expr = tvm.tirx.Sub(value, tvm.tirx.BufferLoad(buffer, [i]))
    assert isinstance(Analyzer().simplify(expr), tvm.tirx.FloatImm)
    kept = without_guards(Analyzer().simplify(with_guarded_floats(expr)))
    tvm.ir.assert_structural_equal(
        kept, tvm.tirx.Sub(*[tvm.tirx.BufferLoad(buffer, [i])] * 2), map_free_vars=True
    )


def test_products_of_selections_have_no_range():
    """TVM's analyzer fails on the range of a variable with such a value."""
    condition = tirx.Var("condition", "bool")
    x, y = (tirx.Var(name, "float64") for name in "xy")
    for value in (tirx.Select(condition, x, y) * x, tirx.Select(condition, x, y) / x):
        variable = tirx.Var("z", "float64")
        with pytest.raises(ValueError, match="float64"):
            Analyzer().bind(variable, value)
        bound = with_guarded_floats(tirx.Bind(variable, value))
        Analyzer().bind(bound.var, bound.value)
        assert without_guards(bound.value).same_as(value)
