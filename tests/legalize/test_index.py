"""Legalization of the operators that index."""

from __future__ import annotations

import numpy as np
import tvm
from sweep import TARGET
from tvm import relax
from tvm.relax.op import grad as backward


def test_dynamic_strided_slice_backward_data_of_an_output_grad_of_unknown_rank():
    """Its rank is that of the data."""
    grad = relax.Var("output_grad", relax.TensorType(dtype="float32"))
    slices = [
        relax.Var(name, relax.TensorType((2,), "int64")) for name in ("begin", "end", "strides")
    ]
    bb = relax.BlockBuilder()
    with bb.function("main", [grad, *slices]):
        with bb.dataflow():
            call = backward.dynamic_strided_slice_backward_data(grad, (4, 5), *slices)
            result = bb.emit_output(call)
        bb.emit_func_output(result)
    machine = relax.VirtualMachine(tvm.compile(bb.get(), TARGET), tvm.cpu())
    value = np.random.default_rng(0).normal(size=(2, 2)).astype("float32")
    bounds = [np.array(bound, "int64") for bound in ([1, 4], [4, 0], [2, -3])]
    output = machine["main"](*map(tvm.runtime.tensor, [value, *bounds])).numpy()
    expected = np.zeros((4, 5), "float32")
    expected[1:4:2, 4:0:-3] = value
    np.testing.assert_array_equal(output, expected)
