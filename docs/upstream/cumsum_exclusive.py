"""The gradient of cumsum ignores exclusive.

With exclusive=True the last element contributes to no sum, but it gets a gradient.

Seen: AssertionError
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


(grad,) = gradients(
    lambda x: relax.op.cumsum(x, 0, exclusive=True), np.ones(4, "float32")
)
np.testing.assert_allclose(grad, [3, 2, 1, 0])
