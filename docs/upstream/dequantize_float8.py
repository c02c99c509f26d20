"""dequantize truncates float8 to integers.

The legalization casts the data to int32 before it subtracts the zero point.

Seen: AssertionError
"""

import ml_dtypes
import numpy as np
import tvm
from tvm import relax


def run(function, *arrays):
    params = [
        relax.Var(f"x{i}", relax.TensorType(a.shape, str(a.dtype)))
        for i, a in enumerate(arrays)
    ]
    bb = relax.BlockBuilder()
    with bb.function("main", params):
        with bb.dataflow():
            result = bb.emit_output(function(*params))
        bb.emit_func_output(result)
    machine = relax.VirtualMachine(tvm.compile(bb.get(), "llvm"), tvm.cpu())
    return machine["main"](*map(tvm.runtime.tensor, arrays))


data = np.array([0.75, 1.5], ml_dtypes.float8_e4m3fn)
scale, zero = np.ones(1, "float32"), np.zeros(1, "float16")
output = run(
    lambda x, s, z: relax.op.dequantize(x, s, z, axis=0), data, scale, zero
).numpy()
np.testing.assert_allclose(output, [0.75, 1.5])
