"""Half precision on a GPU: sums in float32, and one rounding of the result."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest
import tvm
from compile_cuda import compile_for_cuda, leaves, missing
from tvm import relax
from tvm.relax import op

import relax_grad
from relax_grad.gpu.halves import widen_scans
from relax_grad.ir.bindings import bindings_of
from relax_grad.ir.compat import dtype_of

NEEDS_CXX = pytest.mark.skipif(
    missing("g++") is not None, reason=f"{missing('g++')}: the kernels are not emulated"
)
RNG = np.random.default_rng(0)

#: The dtypes, their classes in NumPy, and their epsilons.
HALVES = {
    "bfloat16": (np.dtype(ml_dtypes.bfloat16), 2.0**-7),
    "float16": (np.dtype("float16"), 2.0**-10),
}
BOTH = tuple(HALVES)


def conv(name="conv2d", **options):
    return lambda x, weight: getattr(op.nn, name)(x, weight, **options)


#: Functions with long sums, the shapes of their operands, and the dtypes that they are tested in.
FUNCTIONS = {
    "matmul": (op.matmul, [(5, 300), (300, 7)], BOTH),
    "matmul in parts": (op.matmul, [(3, 4096), (4096, 2)], BOTH),
    "matmul on tensor cores": (op.matmul, [(65, 72), (72, 66)], ("float16",)),
    "matmul of vectors": (op.matmul, [(900,), (900,)], ("bfloat16",)),
    "conv2d": (conv(padding=1, strides=2), [(2, 40, 7, 7), (3, 40, 3, 3)], BOTH),
    "conv2d on tensor cores": (conv(), [(1, 72, 9, 9), (70, 72, 1, 1)], ("float16",)),
    "conv2d, grouped": (conv(groups=2), [(1, 64, 6, 5), (4, 32, 3, 3)], BOTH),
    "conv2d, transposed": (
        conv("conv2d_transpose", strides=2),
        [(1, 90, 3, 3), (90, 2, 3, 3)],
        ("bfloat16",),
    ),
    "einsum": (lambda *x: op.einsum(x, "bij,bkj->bik"), [(2, 3, 300), (2, 4, 300)], ("bfloat16",)),
    "attention": (op.nn.attention, [(1, 3, 2, 8), (1, 300, 2, 8), (1, 300, 2, 8)], ("bfloat16",)),
    "sum": (lambda x: op.sum(x, 1), [(3, 900)], BOTH),
    "sum over all axes": (op.sum, [(3, 900)], ("bfloat16",)),
    "mean": (lambda x: op.mean(x, [0, 2]), [(9, 3, 100)], ("bfloat16",)),
    "variance": (lambda x: op.variance(x, 1), [(3, 900)], ("bfloat16",)),
    "maximum": (lambda x: op.max(x, 1), [(3, 300)], ("float16",)),
    "layer_norm": (
        lambda *x: op.nn.layer_norm(*x, [-1]),
        [(3, 900), (900,), (900,)],
        ("bfloat16",),
    ),
    "softmax": (op.nn.softmax, [(3, 900)], ("bfloat16",)),
    "avg_pool2d": (lambda x: op.nn.avg_pool2d(x, (9, 10)), [(1, 2, 9, 10)], ("bfloat16",)),
    "adaptive_avg_pool2d": (
        lambda x: op.nn.adaptive_avg_pool2d(x, (1, 2)),
        [(1, 2, 17, 18)],
        ("float16",),
    ),
    "cross_entropy": (op.nn.cross_entropy_with_logits, [(300, 3), (300, 3)], BOTH),
}


def entry(name: str, dtype: str) -> str:
    return f"{re.sub('[^a-z0-9]+', '_', name)}_{dtype}"


def added(bb: relax.BlockBuilder, name: str, dtype: str) -> str:
    """Add a function of FUNCTIONS, whose results are the function's and the gradients of the sum of
    their squares."""
    function, shapes, _ = FUNCTIONS[name]
    params = [relax.Var(f"x{i}", relax.TensorType(shape, dtype)) for i, shape in enumerate(shapes)]
    with bb.function(entry(name, dtype), params):
        with bb.dataflow():
            result = bb.emit(function(*params))
            wide = bb.emit(op.astype(result, "float64" if dtype == "float64" else "float32"))
            loss = bb.emit_output(op.sum(bb.emit(op.square(wide))))
            result = bb.emit_output(result)
        bb.emit_func_output(relax.Tuple([loss, result]))
    return entry(name, dtype)


def differentiated(cases) -> tvm.IRModule:
    """Return a module with the functions and their gradients."""
    bb = relax.BlockBuilder()
    entries = [added(bb, name, dtype) for name, dtype in cases]
    module = bb.get()
    for each in entries:
        module = relax_grad.value_and_grad(module, each)
        del module[each]
    return module


#: The cases of the default suite.
FEW = [
    *(("matmul", "bfloat16"), ("matmul on tensor cores", "float16")),
    *(("conv2d", "float16"), ("conv2d, grouped", "bfloat16")),
    *(("sum", "bfloat16"), ("sum", "float16"), ("sum over all axes", "bfloat16")),
    *(("mean", "bfloat16"), ("maximum", "float16"), ("softmax", "bfloat16")),
    *(("adaptive_avg_pool2d", "float16"), ("cross_entropy", "bfloat16")),
]
OTHERS = [
    (name, dtype)
    for name, (*_, dtypes) in FUNCTIONS.items()
    for dtype in dtypes
    if (name, dtype) not in FEW
]


@pytest.fixture(scope="module")
def few():
    return compile_for_cuda(differentiated(FEW), "relax_grad")


def test_every_kernel_has_threads(few):
    assert (few.on_host, few.serial) == ([], [])
    assert "wmma::accumulator, 16, 16, 16, float>" in few.source
    assert "wmma::accumulator, 16, 16, 16, half>" not in few.source


def errors(compiled, cases) -> list[tuple]:
    """Return the cases whose errors, against the same functions in float64, are larger than a few
    roundings explain, with the places of the results and the errors in epsilons.

    All terms of a sum have the same sign. A sum in half precision would lose the small ones.
    """
    wide = differentiated(dict.fromkeys((name, "float64") for name, _ in cases))
    target = tvm.target.Target({"kind": "llvm", "opt-level": 0})
    machine = relax.VirtualMachine(tvm.compile(wide, target), tvm.cpu())
    found = []
    with compiled.emulate() as emulation:
        for name, dtype in cases:
            kind, epsilon = HALVES[dtype]
            values = [RNG.uniform(0.2, 1, shape).astype(kind) for shape in FUNCTIONS[name][1]]
            own = emulation.run(f"{entry(name, dtype)}_adjoint", values)
            tensors = [tvm.runtime.tensor(value.astype("float64")) for value in values]
            wanted = leaves(machine[f"{entry(name, 'float64')}_adjoint"](*tensors))
            # The loss and the gradients of the rounded result, which is half an epsilon off.
            for result, expected, most in zip(own, wanted, [1, 0.55, 2, 2, 2], strict=False):
                error = np.abs(result.astype("float64") - expected).max()
                error /= np.abs(expected).max() * epsilon
                if not error <= most:
                    found.append((name, dtype, most, float(error)))
    return found


@NEEDS_CXX
def test_sums_are_in_float32(few):
    assert errors(few, FEW) == []


@NEEDS_CXX
@pytest.mark.slow
def test_other_sums_are_in_float32(few):
    compiled = compile_for_cuda(differentiated(OTHERS), "relax_grad")
    assert (compiled.on_host, compiled.serial) == ([], [])
    kernels = compiled.source.split('extern "C"')
    on_tensor_cores = {re.search(r"(\w+_kernel\w*)\(", k)[1] for k in kernels if "mma_sync" in k}
    for gradient in ("data", "weight"):
        assert any(f"backward_{gradient}" in kernel for kernel in on_tensor_cores)
    assert errors(compiled, OTHERS) == []
    if missing("nvcc") is None:
        compiled.compile()
        few.compile()


@NEEDS_CXX
def test_integers_of_a_function_stay_as_they_are():
    """Bits of integers, from which a factor in half precision is made, as in quantized weights."""
    x = relax.Var("x", relax.TensorType((3, 400), "bfloat16"))
    packed = relax.Var("packed", relax.TensorType((3, 400), "int32"))
    bb = relax.BlockBuilder()
    with bb.function("main", [x, packed]):
        with bb.dataflow():
            low = bb.emit(op.bitwise_and(packed, relax.const(15, "int32")))
            product = bb.emit(op.multiply(x, bb.emit(op.astype(low, "bfloat16"))))
            result = bb.emit_output(op.multiply(product, product))
        bb.emit_func_output(result)
    kind, epsilon = HALVES["bfloat16"]
    values = RNG.normal(size=(3, 400)).astype(kind), RNG.integers(0, 99, (3, 400)).astype("int32")
    wanted = (values[0].astype("float64") * (values[1] & 15)) ** 2
    with compile_for_cuda(bb.get(), "relax_grad").emulate() as emulation:
        (own,) = emulation.run("main", values)
    np.testing.assert_allclose(own.astype("float64"), wanted, epsilon)


def test_sums_of_scans_are_in_float32():
    """TVM's kernels of ``cumsum`` exchange numbers within a warp without a barrier, so that they
    are not emulated."""
    x = relax.Var("x", relax.TensorType((5, 300), "bfloat16"))
    bb = relax.BlockBuilder()
    with bb.function("main", [x]):
        with bb.dataflow():
            result = bb.emit_output(op.cumsum(x, 1))
        bb.emit_func_output(result)
    module = widen_scans(bb.get())
    scans = [b.value for b in bindings_of(module["main"].body) if "cumsum" in str(b.value)]
    assert [dtype_of(scan.ty) for scan in scans] == ["float32"]
    assert dtype_of(module["main"].ret_ty) == "bfloat16"
