"""A loop whose bounds are an outer index that begins at 1 runs over other elements.

CanonicalizeLoop lets i begin at 0, and leaves it unchanged in the bounds of the inner loop.

Seen: AssertionError
"""

import numpy as np
import tvm
from tvm.script import tirx as T


@T.prim_func(s_tir=True)
def triangle(y: T.Buffer((4, 4), "float32")):
    T.func_attr({"global_symbol": "triangle"})
    for i in range(1, 4):
        for j in range(i, 4):
            y[i, j] = T.float32(1)


result = tvm.runtime.tensor(np.zeros((4, 4), "float32"))
tvm.compile(triangle, "llvm")(result)
expected = np.triu(np.ones((4, 4), "float32"))
expected[0] = 0
np.testing.assert_array_equal(result.numpy(), expected)
