"""layer_norm ignores center=False and scale=False.

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


x = np.array([[1, 2, 3, 4]], "float32")
gamma, beta = np.full(4, 3, "float32"), np.full(4, 10, "float32")
output = run(
    lambda x, g, b: relax.op.nn.layer_norm(x, g, b, [-1], center=False, scale=False),
    x,
    gamma,
    beta,
).numpy()
np.testing.assert_allclose(output, (x - x.mean()) / x.std(), rtol=1e-3)
