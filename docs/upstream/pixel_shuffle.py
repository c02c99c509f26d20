"""pixel_shuffle does not compile.

The legalization calls a function of TOPI that does not exist.

Seen: Error
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


run(lambda x: relax.op.nn.pixel_shuffle(x, 2), np.ones((1, 4, 2, 2), "float32"))
