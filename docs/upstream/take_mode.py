"""The gradient of take ignores the mode.

With mode wrap, the index 5 of an axis of 4 elements names the element 1. Its gradient is lost, or
written out of bounds.

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


index = relax.const(np.array([5], "int64"))
(grad,) = gradients(
    lambda x: relax.op.take(x, index, 0, mode="wrap"), np.ones(4, "float32")
)
np.testing.assert_allclose(grad, [0, 1, 0, 0])
