"""The backward operator of the normalisations: type inference, TVMScript and JSON."""

from __future__ import annotations

import pytest
import tvm
from tvm import relax, tirx
from tvm.relax.op import grad as backward
from tvm.script import from_source
from tvm_ffi import structural_equal


@pytest.mark.parametrize("axis", [None, [], [0, -1], 1])
def test_round_trip(axis):
    data = relax.Var("x", relax.TensorType([4], "float16"))
    bb = relax.BlockBuilder()
    with bb.function("main", [data]):
        bb.emit_func_output(bb.emit(backward.divide_by_count(data, (2, 3), axis)))
    module = bb.get()
    assert structural_equal(from_source(module.script(show_meta=True)), module)
    assert structural_equal(tvm.ir.load_json(tvm.ir.save_json(module)), module)


def test_divide_by_count_infers():
    bb, n = relax.BlockBuilder(), tirx.Var("n", "int64")
    data = relax.Var("x", relax.TensorType([n, 3], "float16"))
    assert structural_equal(bb.normalize(backward.divide_by_count(data, (n, 2))).ty, data.ty)
    with pytest.raises(ValueError, match=r"divide_by_count: axis must lie in \[-2, 2\)"):
        bb.normalize(backward.divide_by_count(data, (n, 2), [0, 2]))
    with pytest.raises(TypeError, match="of_shape must be a shape"):
        bb.normalize(backward.divide_by_count(data, data))
    unknown = relax.Var("s", relax.ShapeType(ndim=-1))
    with pytest.raises(ValueError, match="rank of of_shape must be known"):
        bb.normalize(backward.divide_by_count(data, unknown))
