"""concat with axis=None does not compile.

Type inference accepts it, and flattens the tensors; the legalization has no such case.

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


x = np.ones(2, "float32")
run(lambda x, y: relax.op.concat((x, y), axis=None), x, x)
