"""No kernel reads or writes out of bounds, whatever its inputs contain: see
``guard/kernels.py``."""

from __future__ import annotations

import kernel_cases
import numpy as np
import pytest
import tvm
import tvm.tirx.script.builder as T
from denormals import CAN_TELL, computes_with_denormals
from guard.kernels import run_guarded_kernels
from machines import HALVES as TARGETS_OF_HALVES
from machines import TARGETS, WIDEST, runs_here
from sweep import share, share_of_each
from tvm import tirx

from relax_grad.cpu.dispatch import operators_with_kernels
from relax_grad.cpu.kernel.language import builder as b
from relax_grad.ir.dtypes import HALVES

#: The numbers of the cases in half precision.
IN_HALVES = {
    dtype: [i for i, case in enumerate(kernel_cases.cases()) if case.takes(dtype)]
    for dtype in HALVES
}

#: The numbers of the convolutions and their gradients.
CONVOLUTIONS = [i for i in IN_HALVES["bfloat16"] if ".conv" in kernel_cases.cases()[i].op]

#: The numbers of the recurrent layers and their gradients.
RECURRENCES = [
    i
    for i in IN_HALVES["bfloat16"]
    if kernel_cases.cases()[i].op.startswith(("relax.grad.lstm", "relax.grad.gru", "relax.grad.r"))
]

#: Attention and its gradients.
ATTENTIONS = [i for i in IN_HALVES["bfloat16"] if ".attention" in kernel_cases.cases()[i].op]

#: The step between the cases that the default suite runs.
SOME = 9


def test_every_operator_has_a_case():
    with_cases = {case.op for case in kernel_cases.cases()}
    assert sorted(with_cases) == operators_with_kernels(), (
        "add a call of each to tests/support/kernel_cases/ (docs/kernels.md)"
    )


@pytest.mark.skipif(not CAN_TELL, reason="flags of operands are read on x86 with Linux only")
@pytest.mark.parametrize("initialized", [0, 3, 4])
def test_denormal_operands_are_found(initialized):
    """In the elements of a buffer on the stack that a function of the system leaves unchanged."""

    def body(result) -> None:
        row, one = b.scratch(4), tirx.const(0x3F800000, "int32")
        T.evaluate(tirx.call_extern("handle", "wmemset", row.data, one, b.const(initialized)))
        for i in range(4):
            b.store(result, i, row[i] * 2.0)

    function = b.prim_func("double", b.floats(["result"], [(4,)]), body)
    double = tvm.compile(tvm.IRModule({"double": function}), {"kind": "llvm"})["double"]
    result = tvm.runtime.tensor(np.ones(4, "float32"))
    assert computes_with_denormals(lambda _: lambda: double(result)) == (initialized < 4)


def test_some_kernels():
    assert run_guarded_kernels(WIDEST, range(0, len(kernel_cases.cases()), SOME)) == []


def test_products_with_an_odd_number_of_panels():
    """The panels of a second factor are packed in pairs; the last one has no neighbour."""
    numbers = [i for i, case in enumerate(kernel_cases.cases()) if case.detail.endswith("columns")]
    assert len(numbers) == 3
    assert run_guarded_kernels(WIDEST, numbers) == []


def test_turned_products():
    """Their results are transposed in vectors, whose last ones are partial."""
    numbers = [i for i, case in enumerate(kernel_cases.cases()) if case.detail.endswith("turned")]
    assert len(numbers) == 5
    assert run_guarded_kernels(WIDEST, numbers) == []
    for dtype in HALVES:
        assert run_guarded_kernels(WIDEST, numbers, dtype) == []


def test_a_large_product_of_processors_before_ice_lake():
    """They copy its first factor transposed, whose last strip and steps are partial."""
    if not runs_here("avx512-skylake"):
        pytest.skip("this machine has no AVX-512")
    (number,) = (i for i, case in enumerate(kernel_cases.cases()) if case.detail == "large")
    assert run_guarded_kernels("avx512-skylake", [number]) == []


def test_convolutions_that_copy_their_channels_in_parts():
    """The last part has fewer channels."""
    numbers = [
        i
        for i, case in enumerate(kernel_cases.cases())
        if case.detail.startswith(("(40, 440,", "(480, 40,")) and "weight" not in case.op
    ]
    assert len(numbers) == 4
    for dtype in ("float32", "bfloat16"):
        assert run_guarded_kernels(WIDEST, numbers, dtype) == []


@pytest.mark.parametrize("dtype", HALVES)
def test_some_kernels_in_half_precision(dtype):
    first = 3 + HALVES.index(dtype)
    assert run_guarded_kernels(WIDEST, IN_HALVES[dtype][first :: 2 * SOME], dtype) == []


@pytest.mark.parametrize("target", TARGETS_OF_HALVES)
def test_products_of_pairs(target):
    if not runs_here(target):
        pytest.skip(f"this machine has no {target}")
    known = kernel_cases.cases()
    numbers = [i for i in IN_HALVES["bfloat16"] if known[i].op == "relax.matmul"]
    assert run_guarded_kernels(target, numbers[::2], "bfloat16", optimized=True) == []


@pytest.mark.parametrize("target", TARGETS_OF_HALVES)
def test_some_convolutions_of_pairs(target):
    if not runs_here(target):
        pytest.skip(f"this machine has no {target}")
    known = kernel_cases.cases()
    volumes = [i for i in CONVOLUTIONS if ".conv3d" in known[i].op and known[i].shapes[0][1] == 19]
    numbers = sorted({*CONVOLUTIONS[::SOME], *volumes[:1]})
    assert run_guarded_kernels(target, numbers, "bfloat16") == []


@pytest.mark.parametrize("target", TARGETS_OF_HALVES)
def test_recurrent_layers_of_pairs(target):
    if not runs_here(target):
        pytest.skip(f"this machine has no {target}")
    assert run_guarded_kernels(target, RECURRENCES[::6], "bfloat16", optimized=True) == []


@pytest.mark.parametrize("target", TARGETS_OF_HALVES)
def test_some_attention_of_pairs(target):
    if not runs_here(target):
        pytest.skip(f"this machine has no {target}")
    assert run_guarded_kernels(target, ATTENTIONS[1::6], "bfloat16") == []


def test_quantized_weights_in_tiles():
    """Their inputs and outputs are odd, and their groups incomplete."""
    if not runs_here("amx"):
        pytest.skip("this machine has no AVX-512")
    known = kernel_cases.cases()
    numbers = [i for i in IN_HALVES["bfloat16"] if "quantized" in known[i].op]
    assert run_guarded_kernels("amx", numbers[2:3], "bfloat16") == []


@pytest.mark.slow
def test_all_quantized_weights_in_tiles():
    if not runs_here("amx"):
        pytest.skip("this machine has no AVX-512")
    numbers = [i for i in IN_HALVES["bfloat16"] if "quantized" in kernel_cases.cases()[i].op]
    assert run_guarded_kernels("amx", numbers, "bfloat16", optimized=True) == []


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS_OF_HALVES)
@pytest.mark.parametrize("numbers", [CONVOLUTIONS, ATTENTIONS], ids=["convolutions", "attention"])
def test_all_convolutions_and_attention_of_pairs(target, numbers):
    if not runs_here(target):
        pytest.skip(f"this machine has no {target}")
    assert run_guarded_kernels(target, share(numbers), "bfloat16", optimized=True) == []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("target", TARGETS)
def test_all_kernels_in_half_precision(target, dtype):
    if not runs_here(target):
        pytest.skip(f"this machine has no {target}")
    assert run_guarded_kernels(target, share(IN_HALVES[dtype]), dtype, optimized=True) == []


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_all_kernels(target):
    if not runs_here(target):
        pytest.skip(f"this machine has no {target}")
    known = kernel_cases.cases()
    numbers = share_of_each(list(range(len(known))), lambda number: known[number].op)
    assert run_guarded_kernels(target, numbers, optimized=True) == []
