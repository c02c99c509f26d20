"""group_norm ignores center=False and scale=False.

The legalization adds beta and multiplies by gamma in spite of the attributes.

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


x = np.arange(8, dtype="float32").reshape(1, 4, 2)
gamma, beta = np.full(4, 3, "float32"), np.full(4, 10, "float32")


def function(x, g, b):
    return relax.op.nn.group_norm(x, g, b, 1, 1, [2], center=False, scale=False)


np.testing.assert_allclose(
    run(function, x, gamma, beta).numpy(), (x - x.mean()) / x.std(), rtol=1e-3
)
