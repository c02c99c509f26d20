"""The backward operators of vision operators: type inference, errors and round trips."""

from __future__ import annotations

import pytest
import tvm
from tvm import relax
from tvm.relax.op import grad as backward
from tvm.script import from_source
from tvm_ffi import structural_equal


def var(name, *shape, dtype="float32"):
    return relax.Var(name, relax.TensorType(shape, dtype))


DY, X, ROIS = var("dy", 6, 3, 2, 1), var("x", 2, 3, 4, 5), var("rois", 6, 5)
ALIGN = {"pooled_size": (2, 1), "spatial_scale": 0.5, "sample_ratio": 2, "mode": "max"}
POOL = {"pooled_size": (2, 1), "spatial_scale": 0.5}
CALLS = {
    "roi_align_backward_data": (DY, ALIGN),
    "roi_align_jvp": (X, ALIGN),
    "roi_pool_backward_data": (DY, POOL),
    "roi_pool_jvp": (X, POOL),
}


@pytest.mark.parametrize("name", CALLS)
def test_type_and_round_trip(name):
    first, attrs = CALLS[name]
    params = [relax.Var("first", first.ty), X, ROIS]
    bb = relax.BlockBuilder()
    with bb.function("main", params):
        with bb.dataflow():
            result = bb.emit_output(getattr(backward, name)(*params, **attrs))
        bb.emit_func_output(result)
    module = bb.get()
    expected = X if name.endswith("data") else DY
    tvm.ir.assert_structural_equal(module["main"].ret_ty, expected.ty)
    assert structural_equal(from_source(module.script(show_meta=True)), module)
    assert structural_equal(tvm.ir.load_json(tvm.ir.save_json(module)), module)


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (
            lambda: backward.roi_align_backward_data(var("dy", 6, 3, 1, 2), X, ROIS, **ALIGN),
            ValueError,
            r"output_grad must have the shape \(6, 3, 2, 1\)",
        ),
        (
            lambda: backward.roi_pool_backward_data(
                var("dy", 6, 3, 2, 1, dtype="float16"), X, ROIS, **POOL
            ),
            TypeError,
            "output_grad must have the dtype of the data, float32",
        ),
        (
            lambda: backward.roi_pool_jvp(var("h", 2, 3, 5, 4), X, ROIS, **POOL),
            ValueError,
            r"data_direction must have the shape \(2, 3, 4, 5\)",
        ),
        (
            lambda: backward.roi_align_jvp(X, X, var("rois", 6, 4), **ALIGN),
            ValueError,
            "do not fit relax.vision.roi_align",
        ),
    ],
)
def test_mismatched_arguments_are_refused(build, error, message):
    with pytest.raises(error, match=message):
        relax.BlockBuilder().normalize(build())
