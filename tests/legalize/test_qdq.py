"""The legalization of dequantize for float8, which TVM truncates to integers."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from sweep import TARGET
from tvm import relax


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_keeps_its_fraction(dtype):
    x = relax.Var("x", relax.TensorType((4,), "float32"))
    bb = relax.BlockBuilder()
    with bb.function("main", [x]):
        with bb.dataflow():
            scale = relax.const(np.float32([2.0]))
            zero = relax.const(np.array([1], "int8"))
            data = bb.emit(relax.op.astype(x, dtype))
            result = bb.emit_output(relax.op.dequantize(data, scale, zero, 0, "float32"))
        bb.emit_func_output(result)
    machine = relax.VirtualMachine(tvm.compile(bb.get(), TARGET), tvm.cpu())
    output = machine["main"](tvm.runtime.tensor(np.float32([-1.75, 0.5, 1.25, 40]))).numpy()
    assert output.tolist() == [-5.5, -1.0, 0.5, 78.0]
