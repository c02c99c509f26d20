"""A function for which no GPU has a schedule."""

from __future__ import annotations

import tvm
from tvm import relax, te


def sorted_on_host() -> tvm.IRModule:
    """Return ``main(x)``, which calls a function of the host."""

    def sorted_on_host(x):
        def call(inputs, outputs):
            return tvm.tirx.call_packed("tvm.contrib.sort.sort", inputs[0], outputs[0], 0, True)

        return te.extern(x.shape, [x], call, dtype="float32")

    x = relax.Var("x", relax.TensorType((9, 5), "float32"))
    bb = relax.BlockBuilder()
    with bb.function("main", [x]):
        bb.emit_func_output(bb.emit_te(sorted_on_host, x, primfunc_name_hint="sorted_on_host"))
    return bb.get()
