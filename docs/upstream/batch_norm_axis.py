"""batch_norm does not compile for a negative axis in training.

TOPI removes the axis from a list of axes that are not negative.

Seen: ValueError: list.remove(x)
"""

import numpy as np
import tvm
from tvm import relax

rng = np.random.default_rng(0)
x = rng.normal(size=(4, 5, 3)).astype("float32")

statistics = [np.ones(3, "float32"), *(np.zeros(3, "float32") for _ in range(2))]
statistics.append(np.ones(3, "float32"))
params = [relax.Var("x", relax.TensorType(x.shape, "float32"))]
params += [relax.Var(f"s{i}", relax.TensorType((3,), "float32")) for i in range(4)]
bb = relax.BlockBuilder()
with bb.function("main", params):
    with bb.dataflow():
        result = bb.emit(relax.op.nn.batch_norm(*params, axis=-1, training=True))
        output = bb.emit_output(result[0])
    bb.emit_func_output(output)
machine = relax.VirtualMachine(tvm.compile(bb.get(), "llvm"), tvm.cpu())
normalized = machine["main"](*map(tvm.runtime.tensor, (x, *statistics))).numpy()
expected = (x - x.mean((0, 1))) / np.sqrt(x.var((0, 1)) + 1e-5)
np.testing.assert_allclose(normalized, expected, rtol=1e-3, atol=1e-3)
