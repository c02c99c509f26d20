"""attention is wrong where several heads share keys.

Type inference allows fewer heads of keys than of queries, but the kernel reads the keys of another
head.

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


rng = np.random.default_rng(0)
q = rng.normal(size=(1, 2, 4, 3)).astype("float32")
k, v = (rng.normal(size=(1, 5, 2, 3)).astype("float32") for _ in range(2))
output = run(lambda q, k, v: relax.op.nn.attention(q, k, v), q, k, v).numpy()
k, v = k.repeat(2, axis=2), v.repeat(2, axis=2)
scores = np.einsum("bshd,bthd->bhst", q, k) / np.sqrt(3)
weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
np.testing.assert_allclose(output, np.einsum("bhst,bthd->bshd", weights, v), rtol=1e-4)
