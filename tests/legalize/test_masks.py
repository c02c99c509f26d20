"""Functions from numbers to truth values and back, for a GPU."""

from __future__ import annotations

from compile_cuda import compile_for_cuda
from tvm import relax

import relax_grad  # noqa: F401  (registers the legalizations)


def test_masks_stay_apart_from_products():
    """TVM's code for CUDA loads a vector of truth values as 16-bit integers."""
    x, w, mask = (
        relax.Var(name, relax.TensorType(shape, dtype))
        for name, shape, dtype in [
            ("x", (7, 20), "float32"),
            ("w", (20, 40), "float32"),
            ("mask", (7, 40), "bool"),
        ]
    )
    bb = relax.BlockBuilder()
    with bb.function("main", [x, w, mask]):
        with bb.dataflow():
            product = bb.emit(relax.op.matmul(x, w))
            kept = bb.emit(relax.op.where(mask, product, relax.const(0.0, "float32")))
            back = bb.emit(relax.op.matmul(kept, bb.emit(relax.op.permute_dims(w))))
            signs = bb.emit(relax.op.greater(back, relax.const(0.0, "float32")))
            result = bb.emit_output(relax.Tuple([kept, signs]))
        bb.emit_func_output(result)
    source = compile_for_cuda(bb.get()).source
    assert "matmul" in source
    assert "*(ushort" not in source
