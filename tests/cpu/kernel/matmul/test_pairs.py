"""Products of pairs and of tiles of bfloat16 against NumPy in float64, on processors that run
their code."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import tvm
from machines import HALVES, PAIRS, at, compile_kernels, largest_error, of_halves, runs_here
from tvm import tirx

from relax_grad.cpu.kernel.language.halves import stored_as
from relax_grad.cpu.kernel.matmul.matmul import Matmul, matmul
from relax_grad.cpu.target import CPU, host, x86_64
from relax_grad.cpu.tuning import EARLY_AVX512, ZEN4

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
TARGET = tvm.target.Target(PAIRS["avx512bf16"])
RNG = np.random.default_rng(0)
FORMS = list(itertools.product((False, True), repeat=2))


@pytest.fixture(params=HALVES)
def halves(request, monkeypatch):
    """Compile for a target that multiplies pairs, or tiles."""
    monkeypatch.setitem(globals(), "TARGET", of_halves(request.param))


here = pytest.mark.usefixtures("halves")


def kernel(product: Matmul, result: str = "float32", **properties) -> tirx.PrimFunc:
    """Return the kernel of a product of packed factors in bfloat16."""
    cpu = replace(CPU.of(TARGET), **properties)
    dtypes = ("bfloat16", "bfloat16", result)
    return stored_as(dtypes, 1, lambda: matmul(product, cpu, way="packed"))


def run(
    functions: Sequence[tirx.PrimFunc], inputs: Sequence[Sequence], shape: tuple, result="float32"
) -> list[np.ndarray]:
    library = compile_kernels({f"f{i}": function for i, function in enumerate(functions)}, TARGET)
    outputs = []
    for i, arrays in enumerate(inputs):
        output = tvm.runtime.empty(shape[i], result)
        library[f"f{i}"](*map(tvm.runtime.tensor, arrays), output)
        outputs.append(output.numpy())
    return outputs


def wanted(product: Matmul, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    a, b = (factor.astype("float64") for factor in (a, b))
    a = np.swapaxes(a, -1, -2) if product.transpose_a else a
    return a @ (np.swapaxes(b, -1, -2) if product.transpose_b else b)


def check(products: Sequence[Matmul], *values: dict) -> None:
    """Compare products whose sums are stored in float32, for some values of symbolic extents."""
    # The tiles of registers of the makers of AVX-512 differ; those of AMX sum in stretches.
    rows, own = (ZEN4, EARLY_AVX512), CPU.of(TARGET).tuning
    if CPU.of(TARGET).tiles:
        rows = (own, replace(own, tiles=replace(own.tiles, unit_depth=64)))
    functions = [kernel(product, tuning=row) for row in rows for product in products]
    made = products * len(rows)
    library = compile_kernels({f"f{i}": function for i, function in enumerate(functions)}, TARGET)
    for named in values or ({},):
        for i, product in enumerate(made):
            *shapes, result = [at(shape, named) for shape in product.shapes()]
            arrays = [RNG.normal(size=shape).astype(BFLOAT16) for shape in shapes]
            output = tvm.runtime.empty(result, "float32")
            library[f"f{i}"](*map(tvm.runtime.tensor, arrays), output)
            error = largest_error(output.numpy(), wanted(product, *arrays))
            assert error < 2e-6, (product, named)


@here
def test_sizes():
    sizes = [(33, 45, 70), (11, 17, 1), (12, 64, 515), (10, 33, 2), (9, 1, 5), (25, 32, 64)]
    sizes.append((100, 101, 2301))  # in parts of k
    check([Matmul(*size, *form) for size in sizes for form in FORMS])


@here
def test_batches():
    check([Matmul(13, 37, 31, *form, 3) for form in FORMS])
    check([Matmul(13, 37, 34, False, True, 3, shared_b=True), Matmul(5, 20, 9, batch=3)])


@here
def test_symbolic_extents():
    products = []
    for form in FORMS:
        extents = [tirx.Var(name, "int32") for name in ("m", "n", "k")]
        products.append(Matmul(*extents, *form))
    values = [(1, 1, 1), (23, 40, 67), (10, 32, 600), (7, 5, 0), (64, 33, 1100)]
    check(products, *(dict(zip(("m", "n", "k"), each, strict=True)) for each in values))


@here
def test_results_are_rounded_once():
    """A sum over several stretches of k is rounded at its end."""
    product = Matmul(20, 40, 1500)
    arrays = [RNG.normal(size=shape).astype(BFLOAT16) for shape in product.shapes()[:2]]
    (narrow,) = run([kernel(product, "bfloat16")], [arrays], [(20, 40)], "bfloat16")
    (wide,) = run([kernel(product)], [arrays], [(20, 40)])
    assert narrow.tobytes() == wide.astype(BFLOAT16).tobytes()


@here
def test_results_do_not_depend_on_the_threads():
    product = Matmul(75, 130, 333, True)
    arrays = [RNG.normal(size=shape).astype(BFLOAT16) for shape in product.shapes()[:2]]
    functions = [kernel(product, cores=cores) for cores in (1, 2, 5, 16)]
    first, *others = run(functions, [arrays] * 4, [(75, 130)] * 4)
    assert all(first.tobytes() == other.tobytes() for other in others)


@here
def test_infinities_and_nans():
    a = np.array([[np.inf, 1, 2], [np.nan, 1, 2], [3e38, 3e38, 1]], BFLOAT16)
    (result,) = run([kernel(Matmul(3, 1, 3))], [[a, np.full((3, 1), 2, BFLOAT16)]], [(3, 1)])
    assert np.isnan(result[1, 0])
    assert result[[0, 2], 0].tolist() == [np.inf, np.inf]


def test_only_targets_with_the_instruction_multiply_pairs():
    assert CPU.of(TARGET).bfloat16
    assert not CPU.of(x86_64("v4")).bfloat16
    assert not CPU.of({"kind": "llvm", "mcpu": "skylake-avx512"}).bfloat16
    assert CPU.of(host()).bfloat16 == runs_here("avx512bf16")
    assert "vdpbf16ps" in _assembly(CPU.of(TARGET))
    assert "vdpbf16ps" not in _assembly(replace(CPU.of(TARGET), bfloat16=False))
    # Intel's processors have the instruction, but multiply-adds of float32 are faster there.
    assert not CPU.of({"kind": "llvm", "mcpu": "cooperlake"}).bfloat16


def _assembly(cpu: CPU) -> str:
    function = kernel(Matmul(32, 32, 32), bfloat16=cpu.bfloat16)
    return compile_kernels({"product": function}, TARGET).inspect_source("asm")
