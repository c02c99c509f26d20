"""Element-wise functions with common operands are one kernel."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from compile_cuda import TARGET, compile_for_cuda, missing
from programs import build
from tvm import relax, tirx
from tvm.relax import op

import relax_grad
from relax_grad.gpu.elements import THREADS

NEEDS_CXX = pytest.mark.skipif(
    missing("g++") is not None, reason=f"{missing('g++')}: the kernels are not emulated"
)
RNG = np.random.default_rng(0)


def several(bb, x, row, number):
    """Three results of two common operands, a row and a number that are repeated; one result is an
    operand of another, and one is a choice."""
    scaled = bb.emit(op.add(bb.emit(op.multiply(x, number)), row))
    return relax.Tuple(
        [
            scaled,
            bb.emit(op.tanh(bb.emit(op.multiply(scaled, x)))),
            bb.emit(op.where(bb.emit(op.greater(x, row)), scaled, x)),
        ]
    )


def module_of(shape, dtype="float32"):
    shapes = {"x": shape, "row": shape[1:], "number": ()}
    return build([relax.Var(n, relax.TensorType(s, dtype)) for n, s in shapes.items()], several)


def merged(module):
    """Return the names of the kernels with several results."""
    with TARGET:
        scheduled = relax_grad.pipeline(TARGET)(module)
    names = [variable.name_hint for variable in scheduled.get_global_vars()]
    return [name for name in names if name.startswith("merged")]


@NEEDS_CXX
def test_results_are_those_of_each_function():
    """Sizes below and above a block, a multiple of a block, and one element."""
    shapes = [(5, 7), (3, 2, 61), (4, THREADS), (1, 1)]
    modules = [module_of(shape) for shape in shapes]
    functions = {f"main{i}": module["main"] for i, module in enumerate(modules)}
    whole = tvm.IRModule(
        {name: f.with_attr("global_symbol", name) for name, f in functions.items()}
    )
    compiled = compile_for_cuda(whole, "relax_grad")
    assert (compiled.on_host, compiled.serial) == ([], [])
    assert sum(kernel.startswith("merged") for kernel in compiled.launches) >= len(shapes)
    with compiled.emulate() as emulation:
        for i, shape in enumerate(shapes):
            x, row = (RNG.normal(size=s).astype("float32") for s in (shape, shape[1:]))
            x.flat[0] = np.nan
            number = np.array(0.7, "float32")
            scaled = x * number + row
            wanted = scaled, np.tanh(scaled * x), np.where(x > row, scaled, x)
            for own, expected in zip(
                emulation.run(f"main{i}", [x, row, number]), wanted, strict=True
            ):
                np.testing.assert_allclose(own, expected, 1e-5, 1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_left_to_the_rules_of_tvm(dtype):
    assert merged(module_of((5, 7), dtype)) == []


def test_symbolic_extents_are_left_to_the_rules_of_tvm():
    """They may be 0, and CUDA refuses a grid without blocks."""
    assert merged(module_of((tirx.Var("n", "int64"), 7))) == []


def test_divisions_of_integers_are_left_to_the_rules_of_tvm():
    def divided(bb, x, y):
        return relax.Tuple([bb.emit(op.floor_divide(x, y)), bb.emit(op.add(x, y))])

    params = [relax.Var(name, relax.TensorType((9,), "int32")) for name in "xy"]
    assert merged(build(params, divided)) == []
