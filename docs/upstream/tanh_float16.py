"""tanh of small float16 numbers is 0.

The formula cancels in float16: the result for 1e-4 is 0, and should be 1e-4.

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


x = np.array([1e-4], "float16")
output = run(lambda x: relax.op.tanh(x), x).numpy()
np.testing.assert_allclose(output, np.tanh(x.astype("float32")), rtol=1e-2)
