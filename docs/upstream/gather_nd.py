"""gather_nd reads out of bounds for a large index.

The kernel does not compare an index with the extent of the data. A negative index is read out of
bounds too.

Seen: SIGSEGV
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


run(
    lambda x, i: relax.op.gather_nd(x, i),
    np.zeros(4, "float32"),
    np.array([[1 << 40]], "int64"),
)
