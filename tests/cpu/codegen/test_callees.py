"""Names of tensor functions with a prefix."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi
from programs import build, run, tensor
from tvm import relax, tirx
from tvm.ir import GlobalVar
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import relax_grad
from relax_grad.cpu.codegen.callees import PrefixSymbols

PREFIX = "x86_64_v3_"


def symbols(module: tvm.IRModule) -> set[str]:
    functions = {v: f for v, f in module.functions_items() if isinstance(f, tirx.PrimFunc)}
    assert {v.name_hint for v in functions} == {
        str(f.attrs["global_symbol"]) for f in functions.values()
    }
    return {v.name_hint for v in functions}


@pytest.mark.parametrize("compiles", [False, True])
def test_pipeline_with_a_prefix(compiles):
    """All tensor functions have the prefix, whether TVM compiles them or the pipeline, and the
    results are the same."""

    def body(bb, a, b):
        return relax.op.nn.softmax(bb.emit(relax.op.sin(bb.emit(relax.op.matmul(a, b)))))

    module = build([tensor("a", (5, 70), "float32"), tensor("b", (70, 9), "float32")], body)
    target = relax_grad.target.host()
    options = {"compile_functions": compiles, "symbol_prefix": PREFIX}
    compiled = relax_grad.pipeline(target, **options)(module)
    assert symbols(compiled)
    assert all(name.startswith(PREFIX) for name in symbols(compiled))
    rng = np.random.default_rng(0)
    values = [rng.normal(size=shape).astype("float32") for shape in ((5, 70), (70, 9))]
    result = run(module, "main", *values, target=target, pipeline=relax_grad.pipeline(**options))
    wanted = run(module, "main", *values, target=target, pipeline="relax_grad")
    np.testing.assert_array_equal(result, wanted)


def test_functions_that_call_each_other():
    @I.ir_module
    class Module:
        @T.prim_func(private=True)
        def inner(x: T.Buffer((4,), "float32"), i: T.int32):
            x[i] = x[i] + T.float32(1)

        @T.prim_func
        def outer(x: T.Buffer((4,), "float32")):
            T.func_attr({"global_symbol": "outer"})
            for i in range(4):
                Module.inner(x.data, i)

        @R.function
        def main(x: R.Tensor((4,), "float32")):
            return x

    changed = PrefixSymbols(PREFIX)(Module)
    names = {variable.name_hint: variable for variable in changed.functions}
    assert set(names) == {f"{PREFIX}inner", f"{PREFIX}outer", "main"}
    called: set[GlobalVar] = set()
    tvm_ffi.structural_walk(changed[f"{PREFIX}outer"].body, (GlobalVar, called.add))
    assert called == {names[f"{PREFIX}inner"]}
    # Names with the prefix stay.
    tvm.ir.assert_structural_equal(PrefixSymbols(PREFIX)(changed), changed)
