"""Element-wise functions with common operands are one kernel."""

from __future__ import annotations

import ml_dtypes
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


#: Sizes below and above a block, a multiple of a block, and one element; half precision; extents
#: that are known at run time, with the sizes of tensors.
N, M = (tirx.Var(name, "int64") for name in "nm")
CASES = [
    *(((5, 7), "float32", [(5, 7)]), ((3, 2, 61), "float32", [(3, 2, 61)])),
    *(((4, THREADS), "float32", [(4, THREADS)]), ((1, 1), "float32", [(1, 1)])),
    *(((5, 7), "bfloat16", [(5, 7)]), ((5, 7), "float16", [(5, 7)])),
    ((N, 7), "float32", [(5, 7), (100, 7), (0, 7)]),
    ((N, M), "bfloat16", [(5, 7), (8, 64), (3, 0)]),
]

#: The largest differences from float64: of two roundings of half precision.
TOLERANCES = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}


@NEEDS_CXX
def test_results_are_those_of_each_function():
    modules = [module_of(shape, dtype) for shape, dtype, _ in CASES]
    functions = {f"main{i}": module["main"] for i, module in enumerate(modules)}
    whole = tvm.IRModule(
        {name: f.with_attr("global_symbol", name) for name, f in functions.items()}
    )
    compiled = compile_for_cuda(whole, "relax_grad")
    # The functions that compute shapes are on the host.
    assert [each for each in compiled.on_host if not each.startswith("shape_func")] == []
    assert compiled.serial == []
    assert all(kernel.startswith("merged") for kernel in compiled.launches)
    with compiled.emulate() as emulation:
        for i, (_, dtype, sizes) in enumerate(CASES):
            for size in sizes:
                check(emulation, f"main{i}", dtype, size)


def check(emulation, entry, dtype, size):
    """Compare the three results with the functions in float64."""
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    values = [RNG.normal(size=shape).astype(kind) for shape in (size, size[1:], ())]
    values[0].flat[:1] = np.nan
    x, row, number = (value.astype("float64") for value in values)
    scaled = x * number + row
    wanted = scaled, np.tanh(scaled * x), np.where(x > row, scaled, x)
    tolerance = TOLERANCES[dtype]
    for own, expected in zip(emulation.run(entry, values), wanted, strict=True):
        np.testing.assert_allclose(own.astype("float64"), expected, tolerance, tolerance)


def test_divisions_of_integers_are_left_to_the_rules_of_tvm():
    def divided(bb, x, y):
        return relax.Tuple([bb.emit(op.floor_divide(x, y)), bb.emit(op.add(x, y))])

    params = [relax.Var(name, relax.TensorType((9,), "int32")) for name in "xy"]
    assert merged(build(params, divided)) == []
