"""max_pool2d of a window of minus infinity is a finite number.

The reduction begins with the least finite number, and NaN is dropped.

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


x = np.full((1, 1, 2, 2), -np.inf, "float32")
output = run(lambda x: relax.op.nn.max_pool2d(x, (2, 2)), x).numpy()
np.testing.assert_array_equal(output, [[[[-np.inf]]]])
