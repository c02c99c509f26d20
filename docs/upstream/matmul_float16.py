"""matmul accumulates float16 in float16.

The sum of 4096 ones is 2048. PyTorch accumulates in float32.

Seen: AssertionError
"""

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


x = np.ones((1, 4096), "float16")
output = run(lambda x, y: relax.op.matmul(x, y), x, x.reshape(4096, 1)).numpy()
np.testing.assert_allclose(output, [[4096]])
