"""A division of integers by zero ends the process on x86.

Programs cannot catch the signal as an error.

Seen: SIGFPE
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


run(lambda x, y: relax.op.divide(x, y), np.array([1], "int32"), np.array([0], "int32"))
