"""The operators of scans: type inference and round trips."""

from __future__ import annotations

import pytest
import tvm
from calls import var
from tvm import relax, tirx
from tvm.relax.op import grad as backward
from tvm.script import from_source
from tvm_ffi import structural_equal

N = tirx.Var("n", "int64")


X, FLAT = var("x", (N, 3)), var("f", (6,), "float16")
CALLS = {
    "cumsum": (backward.cumsum_backward_data(X, (N, 3), -1, "float32", True), [X]),
    "cumsum, flattened": (backward.cumsum_backward_data(FLAT, (2, 3)), [FLAT]),
    "linear_scan": (backward.linear_scan(X, X, axis=1), [X]),
    "linear_scan, a product": (backward.linear_scan(X, axis=-1), [X]),
    "linear_scan_reverse": (backward.linear_scan_reverse(X, X), [X]),
}


@pytest.mark.parametrize("name", CALLS)
def test_round_trip(name):
    call, params = CALLS[name]
    bb = relax.BlockBuilder()
    with bb.function("main", params):
        with bb.dataflow():
            result = bb.emit_output(call)
        bb.emit_func_output(result)
    module = bb.get()
    assert structural_equal(from_source(module.script()), module)
    assert structural_equal(tvm.ir.load_json(tvm.ir.save_json(module)), module)


def test_types():
    bb = relax.BlockBuilder()
    assert structural_equal(bb.normalize(CALLS["linear_scan"][0]).ty, X.ty)
    result_type = bb.normalize(CALLS["cumsum, flattened"][0]).ty
    assert structural_equal(result_type, relax.TensorType((2, 3), "float16"))
    unknown = bb.normalize(
        backward.cumsum_backward_data(FLAT, relax.Var("s", relax.ShapeType(ndim=2)))
    )
    assert structural_equal(unknown.ty, relax.TensorType(dtype="float16", ndim=2))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: backward.cumsum_backward_data(FLAT, (2, 4)),
            ValueError,
            "cumsum_backward_data: output_grad must have the shape .8.",
        ),
        (
            lambda: backward.cumsum_backward_data(X, (2, 3), 2),
            ValueError,
            r"cumsum_backward_data: axis must lie in \[-2, 2\).*it is 2",
        ),
        (lambda: backward.cumsum_backward_data(X, X, 0), TypeError, "data_shape must be a shape"),
        (
            lambda: backward.linear_scan(X, axis=-3),
            ValueError,
            r"linear_scan: axis must lie in \[-2, 2\).*it is -3",
        ),
        (
            lambda: backward.linear_scan_reverse(FLAT, var("b", (6,))),
            ValueError,
            "linear_scan_reverse: increment must have the type",
        ),
        (
            lambda: backward.linear_scan(FLAT, var("b", (5,), "float16")),
            ValueError,
            "linear_scan: increment must have the type",
        ),
    ],
)
def test_mismatched_arguments_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        relax.BlockBuilder().normalize(call())
