"""The gradient of triu refuses every call.

The rule returns one partial for two arguments.

Seen: Error
"""

import numpy as np
import tvm
from tvm import relax


def gradients(function, *arrays):
    params = [
        relax.Var(f"x{i}", relax.TensorType(a.shape, str(a.dtype)))
        for i, a in enumerate(arrays)
    ]
    bb = relax.BlockBuilder()
    with bb.function("main", params):
        with bb.dataflow():
            loss = bb.emit_output(relax.op.sum(bb.emit(function(*params))))
        bb.emit_func_output(loss)
    module = relax.transform.Gradient("main")(bb.get())
    machine = relax.VirtualMachine(tvm.compile(module, "llvm"), tvm.cpu())
    _, grads = machine["main_adjoint"](*map(tvm.runtime.tensor, arrays))
    return [gradient.numpy() for gradient in grads]


gradients(lambda x: relax.op.triu(x, 1), np.ones((3, 3), "float32"))
