"""FuseOps loses parameters of functions that read many tuples.

It notes the places of all tuples among the parameters before it replaces the first one by its
elements. Two elements of one tuple move the later places, so that another parameter is removed, and
a variable of the caller is left in the body. The order of the replacements is that of addresses.

Seen: AssertionError
"""

import numpy as np
import tvm
from tvm import relax

x = relax.Var("x", relax.TensorType((4, 5), "float32"))
ones = relax.const(np.ones(5, "float32"))
bb = relax.BlockBuilder()
with bb.function("main", [x]):
    with bb.dataflow():
        total = x
        for _ in range(40):
            norm = bb.emit(relax.op.nn.batch_norm(x, ones, ones, ones, ones, axis=1))
            for index in range(2):
                element = bb.emit(relax.TupleGetItem(norm, index))
                total = bb.emit(relax.op.add(total, element))
        result = bb.emit_output(total)
    bb.emit_func_output(result)
passes = [
    relax.transform.LegalizeOps(),
    relax.transform.AnnotateTIROpPattern(),
    relax.transform.FuseOps(),
]
fused = tvm.transform.Sequential(passes)(bb.get())
for function in fused.functions.values():
    if isinstance(function, relax.Function):
        assert not relax.analysis.free_vars(function)
