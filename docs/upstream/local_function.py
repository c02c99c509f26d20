"""Gradient gives no gradient to the arguments of a call of another Relax function.

The pass treats the call as a constant, without an error.

Seen: AssertionError
"""

import numpy as np
import tvm
from tvm import relax

x = relax.Var("x", relax.TensorType((3,), "float32"))
y = relax.Var("y", relax.TensorType((3,), "float32"))
bb = relax.BlockBuilder()
with bb.function("square", [y], private=True):
    with bb.dataflow():
        result = bb.emit_output(relax.op.multiply(y, y))
    bb.emit_func_output(result)
square = bb.get().get_global_var("square")
with bb.function("main", [x]):
    with bb.dataflow():
        loss = bb.emit_output(relax.op.sum(bb.emit(relax.Call(square, [x]))))
    bb.emit_func_output(loss)
module = relax.transform.Gradient("main")(bb.get())
machine = relax.VirtualMachine(tvm.compile(module, "llvm"), tvm.cpu())
value = np.array([1, 2, 3], "float32")
_, (gradient,) = machine["main_adjoint"](tvm.runtime.tensor(value))
np.testing.assert_allclose(gradient.numpy(), 2 * value)
