"""A descending index within a remainder reads other elements, some out of bounds.

FlattenBuffer rewrites (11 - i) % 12 wrongly in a tensor function.

Seen: AssertionError
"""

import numpy as np
import tvm
from tvm import te

x = te.placeholder((12,), "float32", name="x")
y = te.compute((24,), lambda i: x[(11 - i) % 12], name="y")
kernel = tvm.compile(te.create_prim_func([x, y]), "llvm")
value = np.arange(12, dtype="float32")
result = tvm.runtime.tensor(np.zeros(24, "float32"))
kernel(tvm.runtime.tensor(value), result)
np.testing.assert_array_equal(result.numpy(), value[(11 - np.arange(24)) % 12])
