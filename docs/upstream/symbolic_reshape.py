"""Gradient refuses a reshape whose extents are expressions of symbolic variables.

The error is a missing key of a map. Extents that are variables themselves are supported.

Seen: KeyError
"""

from tvm import relax, tirx

n = tirx.Var("n", "int64")
x = relax.Var("x", relax.TensorType((n, 4), "float32"))
bb = relax.BlockBuilder()
with bb.function("main", [x]):
    with bb.dataflow():
        loss = bb.emit_output(relax.op.sum(bb.emit(relax.op.reshape(x, (n * 4,)))))
    bb.emit_func_output(loss)
relax.transform.Gradient("main")(bb.get())
