"""The gradient of where has the wrong shape for a broadcast operand.

The rule leaves out the sum over the axes of the broadcast.

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


condition = relax.const(np.array([[True, False, True]]))
x, y = np.ones((2, 3), "float32"), np.ones(3, "float32")
slopes = gradients(lambda x, y: relax.op.where(condition, x, y), x, y)
np.testing.assert_allclose(slopes[1], [0, 2, 0])
