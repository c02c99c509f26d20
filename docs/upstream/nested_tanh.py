"""Nested calls of tanh take five times the code, and time, at each level.

LowerIntrin copies the argument of tanh five times, of tan and atanh twice.

Seen: AssertionError
"""

import tvm
from tvm import tirx
from tvm.script import tirx as T


@T.prim_func(s_tir=True)
def nested(x: T.Buffer((4,), "float64"), y: T.Buffer((4,), "float64")):
    T.func_attr({"global_symbol": "nested"})
    for i in range(4):
        y[i] = T.tanh(T.tanh(T.tanh(T.tanh(x[i]))))


target = tvm.target.Target("llvm")
module = tirx.transform.BindTarget(target.with_host(target))(
    tvm.IRModule({"nested": nested})
)
lowered = tirx.transform.LowerIntrin()(module)["nested"].script()
assert lowered.count("x[i]") < 100, lowered.count("x[i]")
