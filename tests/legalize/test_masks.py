"""Functions from numbers to truth values and back, for a GPU, and comparisons of truth values."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from compile_cuda import compile_for_cuda
from tvm import relax

import relax_grad


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


def test_computed_truth_values_are_compared():
    """LLVM has no comparison of one-bit numbers as TVM writes it."""
    x = relax.Var("x", relax.TensorType((4,), "float32"))
    zero, one = (relax.const(value, "float32") for value in (0.0, 1.0))
    bb = relax.BlockBuilder()
    with bb.function("main", [x]):
        with bb.dataflow():
            first, second = bb.emit(relax.op.less(x, one)), bb.emit(relax.op.greater(x, zero))
            same = bb.emit(relax.op.equal(first, second))
            others = bb.emit(relax.op.not_equal(first, second))
            result = bb.emit_output(relax.Tuple([same, others]))
        bb.emit_func_output(result)
    machine = relax.VirtualMachine(tvm.compile(bb.get(), "llvm"), tvm.cpu())
    same, others = machine["main"](tvm.runtime.tensor(np.array([-1, 0, 0.5, 2], "float32")))
    assert same.numpy().tolist() == [False, False, True, False]
    assert others.numpy().tolist() == [True, True, False, True]


@pytest.mark.parametrize("pipeline", ["default", "relax_grad"])
def test_comparisons_with_nan(pipeline):
    """NaN differs from every number, and from itself."""
    names = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")
    first = np.array([np.nan, 1, np.nan, 1, -0.0, np.inf, 2, 3])
    second = np.array([np.nan, np.nan, 0, 1, 0.0, np.inf, 3, 2])
    arrays, results = [], []
    bb = relax.BlockBuilder()
    params = []
    for dtype in ("float64", "float32", "float16"):
        pair = [relax.Var(f"{k}_{dtype}", relax.TensorType((8,), dtype)) for k in ("x", "y")]
        params += pair
        arrays += [first.astype(dtype), second.astype(dtype)]
    with bb.function("main", params):
        with bb.dataflow():
            for x, y in zip(params[::2], params[1::2], strict=True):
                results += [bb.emit(getattr(relax.op, name)(x, y)) for name in names]
                one = relax.const(1.0, str(x.ty.dtype))
                results.append(bb.emit(relax.op.not_equal(x, one)))
            result = bb.emit_output(relax.Tuple(results))
        bb.emit_func_output(result)
    target = "llvm" if pipeline == "default" else relax_grad.target.host()
    built = tvm.compile(bb.get(), target, relax_pipeline=pipeline)
    machine = relax.VirtualMachine(built, tvm.cpu())
    values = iter(machine["main"](*map(tvm.runtime.tensor, arrays)))
    for x, y in zip(arrays[::2], arrays[1::2], strict=True):
        for name in names:
            assert next(values).numpy().tolist() == getattr(np, name)(x, y).tolist(), name
        assert next(values).numpy().tolist() == (x != 1).tolist()
