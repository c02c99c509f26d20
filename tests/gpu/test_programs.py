"""Programs of several operators on a GPU: faults of TVM's default pipeline for GPUs that a single
operator does not show."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tvm
from compile_cuda import compile_for_cuda, leaves, missing
from programs import build, tensor
from tvm import relax
from tvm.relax import op

import relax_grad
from relax_grad.frontend import random
from relax_grad.transform import PlainNames

NEEDS_NVCC = pytest.mark.skipif(
    missing("nvcc") is not None, reason=f"{missing('nvcc')}: the CUDA source is not compiled"
)
NEEDS_CXX = pytest.mark.skipif(
    missing("g++") is not None, reason=f"{missing('g++')}: the kernels are not emulated"
)
ON_DEVICE = pytest.mark.skipif(
    not tvm.cuda().exist,
    reason="no CUDA device: kernels are compiled and emulated, and not run on one",
)
RNG = np.random.default_rng(0)


def differentiated(shapes, body, dtype="float32"):
    """Return a function of the sum of the squares of a function's result, with its gradients, and
    values."""
    params = [tensor(f"x{i}", shape, dtype) for i, shape in enumerate(shapes)]

    def loss(bb, *operands):
        result = bb.emit(op.astype(bb.emit(body(bb, *operands)), "float32"))
        return op.sum(bb.emit(op.square(result)))

    module = relax_grad.value_and_grad(build(params, loss))
    del module["main"]
    return module, [RNG.normal(size=shape).astype("float32") for shape in shapes]


def results(module, values, target, device):
    machine = relax.VirtualMachine(tvm.compile(module, target), device)
    tensors = [tvm.runtime.tensor(value, device) for value in values]
    return list(leaves(machine["main_adjoint"](*tensors)))


def check_close(own, module, values):
    """Compare results with those of LLVM's code for the CPU."""
    wanted = results(module, values, "llvm", tvm.cpu())
    for result, expected in zip(own, wanted, strict=True):
        np.testing.assert_allclose(result, expected, 1e-4, 1e-4 * np.abs(expected).max())


def check_emulated(module, values):
    compiled = compile_for_cuda(module)
    assert (compiled.on_host, compiled.serial) == ([], [])
    with compiled.emulate() as emulation:
        check_close(emulation.run("main_adjoint", values), module, values)


def first(result, width):
    return op.strided_slice(result, [result.ty.ndim - 1], [0], [width])


def padded_crop(bb, x, weight):
    """The gradient of padding at the end is the first elements of its operand."""
    padded = op.nn.pad(x, [0, 0, 0, 0, 0, 2])
    return op.nn.conv1d(bb.emit(padded), weight)


#: Functions that read the first elements of a sum, or that write them, behind the sum.
PARTS = {
    "conv1d": ([(2, 3, 12), (4, 3, 3)], lambda bb, *x: first(bb.emit(op.nn.conv1d(*x)), 7)),
    "conv2d": ([(1, 2, 6, 6), (3, 2, 3, 3)], lambda bb, *x: first(bb.emit(op.nn.conv2d(*x)), 3)),
    "vector": ([(1, 6), (6, 7)], lambda bb, *x: first(bb.emit(op.matmul(*x)), 4)),
    "vector operand": ([(1, 8), (6, 7)], lambda bb, x, y: op.matmul(bb.emit(first(x, 6)), y)),
    "bias": (
        [(2, 3, 12), (4, 3, 3), (1, 4, 1)],
        lambda bb, x, w, b: first(bb.emit(op.add(bb.emit(op.nn.conv1d(x, w)), b)), 5),
    ),
    "padding": ([(2, 3, 12), (4, 3, 3)], padded_crop),
}


@NEEDS_CXX
@pytest.mark.parametrize("name", PARTS)
def test_slices_behind_sums(name):
    check_emulated(*differentiated(*PARTS[name]))


def dropped(bb, x, seed):
    seed = bb.emit(op.astype(seed, "int64"))
    return random.dropout(bb, seed, 1, bb.emit(op.tanh(x)), 0.3)[0]


@NEEDS_CXX
@pytest.mark.parametrize("shape", [(2, 40, 5), (64,)])
def test_dropout(shape):
    """Masks of several rows of the generator, whose blocks write several numbers."""
    check_emulated(*differentiated([shape, ()], dropped))


@ON_DEVICE
@pytest.mark.parametrize("name", [*PARTS, "dropout"])
def test_programs_on_the_device(name):
    module, values = differentiated(*({**PARTS, "dropout": ([(300, 70), ()], dropped)}[name]))
    check_close(results(module, values, "cuda", tvm.cuda()), module, values)


@NEEDS_CXX
def test_random_numbers_are_those_of_the_cpu():
    """Each form of numbers, of a constant and of a symbolic count."""
    n = tvm.tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorType((n,), "float32"))
    seed = relax.Var("seed", relax.TensorType((), "int64"))
    bb = relax.BlockBuilder()
    with bb.function("main", [seed, x]):
        with bb.dataflow():
            drawn = [
                random.uniform(bb, seed, 0, (130,)),
                random.uniform(bb, seed, 1, (9, n), "float64"),
                random.exponential(bb, seed, 5, (n,), "float64"),
                random.bernoulli(bb, seed, 2, (n,), 0.25),
                random.bits(bb, seed, 3, (3, 50)),
                random.randint(bb, seed, 4, -5, 9, (n, 2)),
            ]
            result = bb.emit_output(relax.Tuple(drawn))
        bb.emit_func_output(result)
    values = [np.array(7), np.zeros(100, "float32")]
    machine = relax.VirtualMachine(tvm.compile(bb.get(), "llvm"), tvm.cpu())
    wanted = leaves(machine["main"](*map(tvm.runtime.tensor, values)))
    compiled = compile_for_cuda(bb.get())
    assert compiled.serial == []
    with compiled.emulate() as emulation:
        for own, expected in zip(emulation.run("main", values), wanted, strict=True):
            np.testing.assert_allclose(own, expected, 1e-14)


def test_names_of_adjoints_are_identifiers():
    """Parameters of a ``torch.nn.Sequential`` begin with a digit, and a step takes them from a
    tuple."""
    weight = tensor("0.weight", (6, 6), "float32")

    def body(bb, x, weight):
        y = bb.emit(op.tanh(bb.emit(op.matmul(x, weight))))
        return op.sum(bb.emit(op.matmul(y, weight)))

    module = relax_grad.value_and_grad(
        build([tensor("x", (5, 6), "float32"), weight], body), wrt=["0.weight"]
    )
    names = {
        binding.var.name
        for block in module["main_adjoint"].body.blocks
        for binding in block.bindings
    }
    assert any("weight_adjoint" in name for name in names)
    assert not [name for name in names if not re.fullmatch(r"[A-Za-z_]\w*", name)]
    assert module["main_adjoint"].params[1].name == "0.weight"
    source = compile_for_cuda(PlainNames()(module)).source
    assert "__restrict__ _0_weight" in source
    assert not re.search(r"__restrict__ \d", source)


def missing_rows(bb, x):
    """Read rows of which one is out of bounds, and is NaN."""
    return op.take(x, relax.const(np.array([2, 7, 0]), "int64"), axis=0, mode="nan")


@pytest.fixture(scope="module")
def not_finite():
    return compile_for_cuda(differentiated([(5, 6)], missing_rows, "bfloat16")[0])


def test_bfloat16_constants_are_numbers(not_finite):
    """TVM writes those that are not finite as names that do not exist."""
    assert "bfloat16" in not_finite.source
    assert not re.search(r"\b(nanf|inff)\b", not_finite.source)


@NEEDS_NVCC
def test_nvcc_takes_bfloat16_constants(not_finite):
    not_finite.compile()


def test_functions_of_bfloat16_are_of_float32():
    """CUDA has few functions of bfloat16."""
    names = ["acos", "acosh", "asin", "asinh", "atan", "atanh", "cosh", "sinh", "tan", "tanh"]
    bb = relax.BlockBuilder()
    for name in names:
        x = tensor("x", (70,), "bfloat16")
        with bb.function(name, [x]):
            with bb.dataflow():
                result = bb.emit_output(getattr(op, name)(x))
            bb.emit_func_output(result)
    source = compile_for_cuda(bb.get()).source
    assert not [name for name in names if not re.search(rf"\b{name}h?f\(", source)]


@NEEDS_CXX
@pytest.mark.parametrize("reduce", [op.sum, op.mean], ids=lambda reduce: reduce.__name__)
def test_reductions_over_all_axes_of_symbolic_extents(reduce):
    """The function also reads the result, to replace that of no elements."""
    n = tvm.tirx.Var("n", "int64")
    x = tensor("x0", (n, 3), "float32")

    def loss(bb, x):
        return op.multiply(reduce(bb.emit(op.tanh(x))), relax.const(3.0, "float32"))

    module = relax_grad.value_and_grad(build([x], loss))
    del module["main"]
    values = [RNG.uniform(0.5, 1.5, (9, 3)).astype("float32")]
    with compile_for_cuda(module).emulate() as emulation:
        check_close(emulation.run("main_adjoint", values), module, values)


#: Functions whose kernels or gradients TVM does not compile in a half precision for a GPU.
IN_HALF = {
    "mod": ("float16", [(5, 6), (5, 6)], lambda bb, *x: op.mod(*x)),
    "atan2": ("bfloat16", [(5, 6), (5, 6)], lambda bb, *x: op.atan2(*x)),
    "max": ("bfloat16", [(5, 6)], lambda bb, x: op.max(x, 0)),
    "min": ("bfloat16", [(5, 6)], lambda bb, x: op.min(x)),
    "dot": ("float16", [(7,), (7,)], lambda bb, *x: op.einsum(x, "i,i->")),
    "total": ("bfloat16", [(7, 3)], lambda bb, x: op.einsum((x,), "ij->")),
    "total of a scalar": ("float16", [(), (7, 3)], lambda bb, *x: op.einsum(x, ",ij->ij")),
}


@pytest.mark.parametrize("name", IN_HALF)
def test_functions_in_half_precision(name):
    dtype, shapes, body = IN_HALF[name]
    compiled = compile_for_cuda(differentiated(shapes, body, dtype)[0])
    assert (compiled.on_host, compiled.serial) == ([], [])
    assert not re.search(r"\b(nanf|inff)\b", compiled.source)
