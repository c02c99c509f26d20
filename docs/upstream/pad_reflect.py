"""pad in mode reflect reads out of bounds if the padding is wider than the axis.

The index is reflected once. PyTorch refuses such a padding, and NumPy reflects again.

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


x = np.arange(3, dtype="float32")
output = run(lambda x: relax.op.nn.pad(x, [0, 8], "reflect"), x).numpy()
np.testing.assert_array_equal(output, np.pad(x, (0, 8), "reflect"))
