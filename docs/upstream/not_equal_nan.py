"""not_equal is False for NaN.

The code generator of LLVM writes an ordered comparison; also for != in a tensor function.

Seen: AssertionError
"""

import numpy as np
import tvm
from tvm import relax

x = relax.Var("x", relax.TensorType((2,), "float32"))
bb = relax.BlockBuilder()
with bb.function("main", [x]):
    with bb.dataflow():
        result = bb.emit_output(relax.op.not_equal(x, x))
    bb.emit_func_output(result)
machine = relax.VirtualMachine(tvm.compile(bb.get(), "llvm"), tvm.cpu())
values = np.array([np.nan, 1], "float32")
output = machine["main"](tvm.runtime.tensor(values)).numpy()
np.testing.assert_array_equal(output, values != values)
