"""The gradient of astype passes through integers.

A conversion to integers is piecewise constant, so the gradient of the floating-point argument is 0.

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


def function(x):
    return relax.op.astype(relax.op.astype(x, "int32"), "float32")


(grad,) = gradients(function, np.array([1.5], "float32"))
np.testing.assert_allclose(grad, [0])
