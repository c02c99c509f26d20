"""A compiled program crashes for a NumPy array that is not aligned to 16 bytes.

The virtual machine takes the array without a copy, and the kernels assume an alignment that nothing
checks.

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
    return machine["main"](*arrays)


run(lambda x: relax.op.multiply(x, x), np.zeros(4097, "float32")[1:])
