"""Kernels of normalisations leave out the casts around them, bit for bit."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import tvm
from calls import tensor
from dispatched import HOST, kernels_in
from programs import build
from tvm import relax
from tvm.ir import Op

from relax_grad.transform import DispatchKernels

RNG = np.random.default_rng(0)
HALVES = {"float16": np.dtype("float16"), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
SHAPE = (3, 5, 7, 9)
op = relax.op


def casts_in(module: tvm.IRModule) -> int:
    """Return the number of casts that remain beside kernels."""
    return sum(
        isinstance(binding.value, relax.Call) and binding.value.op == Op.get("relax.astype")
        for _, function in DispatchKernels(HOST)(module).functions_items()
        if isinstance(function, relax.Function)
        for block in function.body.blocks
        for binding in block.bindings
    )


def normalised(bb, kind: str, x, *vectors):
    """Return a normalisation."""
    if kind == "batch_norm":
        zeros, ones = (relax.const(np.full(SHAPE[1], i, "float32")) for i in (0, 1))
        return bb.emit(op.nn.batch_norm(x, *vectors, zeros, ones, axis=1, training=True))[0]
    return op.nn.layer_norm(x, *vectors, axes=[1, 2, 3])


def module_of(kind: str, dtype: str, returned=()) -> tvm.IRModule:
    """Return a normalisation of float32 between casts from and to a dtype; with the dtypes
    ``returned``, these casts of its result too."""
    vector = SHAPE[1:2] if kind == "batch_norm" else SHAPE[1:]
    params = [
        tensor(name, shape, dtype)
        for name, shape in zip("xgb", (SHAPE, vector, vector), strict=True)
    ]

    def body(bb, *arguments):
        wide = [bb.emit(op.astype(x, "float32")) for x in arguments]
        result = bb.emit(normalised(bb, kind, *wide))
        results = [bb.emit(op.astype(result, name)) for name in (dtype, *returned)]
        return relax.Tuple([*results, op.exp(results[0])])

    return build(params, body)


def run(module: tvm.IRModule, arrays) -> list[np.ndarray]:
    machine = relax.VirtualMachine(
        tvm.compile(module, HOST, relax_pipeline="relax_grad"), tvm.cpu()
    )
    return [result.numpy() for result in machine["main"](*map(tvm.runtime.tensor, arrays))]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", ["batch_norm", "layer_norm"])
def test_kernels_read_and_write_half_precision(kind, dtype):
    module, wide = module_of(kind, dtype), module_of(kind, "float32")
    assert kernels_in(module) == [f"nn_{kind}_kernel"]
    assert casts_in(module) == 0
    half = HALVES[dtype]
    shapes = [param.ty.shape.values for param in module["main"].params]
    arrays = [RNG.normal(size=list(map(int, shape))).astype(half) for shape in shapes]
    result, _ = run(module, arrays)
    wanted, _ = run(wide, [array.astype("float32") for array in arrays])
    assert result.tobytes() == wanted.astype(half).tobytes()


@pytest.mark.parametrize("returned", ["float32", "float16"])
def test_results_with_other_uses_stay_in_float32(returned):
    module = module_of("batch_norm", "bfloat16", [returned])
    assert casts_in(module) == 2
    shapes = (SHAPE, SHAPE[1:2], SHAPE[1:2])
    arrays = [RNG.normal(size=shape).astype(HALVES["bfloat16"]) for shape in shapes]
    narrow, other, _ = run(module, arrays)
    (wanted, _) = run(
        module_of("batch_norm", "float32"), [array.astype("float32") for array in arrays]
    )
    assert narrow.tobytes() == wanted.astype(narrow.dtype).tobytes()
    assert other.tobytes() == wanted.astype(returned).tobytes()


def test_products_keep_their_casts():
    """A product of elements in half precision is another kernel, whose sums differ."""
    params = [tensor(name, (20, 20), "bfloat16") for name in "ab"]

    def body(bb, *arguments):
        return op.matmul(*(bb.emit(op.astype(x, "float32")) for x in arguments))

    assert casts_in(build(params, body)) == 2
