"""The backward operators of softmax and log_softmax: type inference, TVMScript and JSON."""

from __future__ import annotations

import pytest
import tvm
from tvm import relax, tirx
from tvm.relax.op import grad as backward
from tvm.script import from_source
from tvm_ffi import structural_equal

N = tirx.Var("n", "int64")
NAMES = ["softmax_backward", "log_softmax_backward"]


def tensor(*shape, dtype="float16"):
    return relax.Var("x", relax.TensorType(list(shape), dtype))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("axis", [0, -1])
def test_round_trip_and_type(axis, name):
    """The forward result may have a wider dtype than its gradient."""
    params = [tensor(N, 3), tensor(N, 3, dtype="float32")]
    bb = relax.BlockBuilder()
    with bb.function("main", params):
        bb.emit_func_output(bb.emit(getattr(backward, name)(*params, axis)))
    module = bb.get()
    assert structural_equal(module["main"].ret_ty, params[0].ty)
    assert structural_equal(from_source(module.script(show_meta=True)), module)
    assert structural_equal(tvm.ir.load_json(tvm.ir.save_json(module)), module)


@pytest.mark.parametrize(
    ("arguments", "axis", "kind", "match"),
    [
        ([tensor(N, 4), tensor(N, 3)], 1, ValueError, "output_grad must have the shape"),
        ([tensor(N, 3), tensor(N, 3)], 2, ValueError, "do not fit relax.nn.(log_)?softmax"),
        ([tensor(3, dtype="int32"), tensor(3)], 0, TypeError, "output_grad must be floating-point"),
        ([tensor(3), tensor(3, dtype="int32")], 0, TypeError, "do not fit relax.nn.(log_)?softmax"),
        ([tensor(3), relax.Var("s", relax.ShapeType([3]))], 0, TypeError, "output must be a"),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_mismatched_arguments_are_refused(arguments, axis, kind, match, name):
    with pytest.raises(kind, match=rf"relax\.grad\.{name}: .*{match}"):
        relax.BlockBuilder().normalize(getattr(backward, name)(*arguments, axis))
