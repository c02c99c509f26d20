"""Functions that FuseTIR cannot fuse stay apart."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax, tirx

import relax_grad


@pytest.mark.parametrize("count", [1, 2])
def test_extents_as_numbers_beside_other_extents(count):
    """The places of one axis times the extent of another one."""
    rows, columns = (tirx.Var(name, "int64") for name in ("rows", "columns"))
    x, y = (
        relax.Var(name, relax.TensorType((extent,), "float32"))
        for name, extent in (("x", rows), ("y", columns))
    )
    bounds = [tirx.IntImm("int64", 0), columns, tirx.IntImm("int64", 1)]
    bb = relax.BlockBuilder()
    with bb.function("main", [x, y]):
        with bb.dataflow():
            numbers = bb.emit(relax.op.arange(*bounds, "int64"))
            for _ in range(count):
                size = bb.emit(relax.op.shape_to_tensor(relax.ShapeExpr([rows])))
                size = bb.emit(relax.op.reshape(size, ()))
                numbers = bb.emit(relax.op.multiply(numbers, size))
            result = bb.emit_output(relax.op.cumsum(numbers, 0))
        bb.emit_func_output(result)
    built = tvm.compile(bb.get(), relax_grad.target.host(), relax_pipeline="relax_grad")
    data = (tvm.runtime.tensor(np.zeros(extent, "float32")) for extent in (3, 5))
    numbers = relax.VirtualMachine(built, tvm.cpu())["main"](*data)
    np.testing.assert_array_equal(numbers.numpy(), (np.arange(5) * 3**count).cumsum())
