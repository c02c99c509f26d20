"""The gradient of power is NaN at 0 where the derivative is 0.

The derivative by the exponent is computed as x ** y * log(x).

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


x, y = np.zeros(1, "float32"), np.full(1, 2, "float32")
slopes = gradients(lambda x, y: relax.op.power(x, y), x, y)
np.testing.assert_allclose(slopes, [[0], [0]])
