"""log_add_exp overflows for large arguments.

The legalization computes log(exp(x) + exp(y)), where the operator exists to avoid this overflow.

Seen: AssertionError
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


x = np.array([1000], "float32")
output = run(lambda x, y: relax.op.log_add_exp(x, y), x, x).numpy()
np.testing.assert_allclose(output, np.logaddexp(x, x), rtol=1e-6)
