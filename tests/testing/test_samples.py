"""Every sample of every operator: orders, dtypes, symbolic shapes, and parity with PyTorch.

TVM's pass differentiates every sample that it supports. relax_grad's pass differentiates the others
and, in the long sweeps, the symbolic shapes once more. ``tests/autodiff/test_gradient.py`` compares
the two passes.

The first-order tests of all dtypes compile kernels with assertions on their arguments. Most other
tests omit the assertions, which take half of the time to compile a kernel.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import tvm
from sweep import TARGET, share_of_each
from versions import REGIONS, UNEVEN_WINDOWS

from relax_grad.testing import check_many_against_torch, check_many_gradients
from relax_grad.testing._program import without_assertions
from relax_grad.testing.samples import sampled_operators, samples

SAMPLES = [
    pytest.param(sample, id=f"{op.removeprefix('relax.')}-{i}")
    for op in sampled_operators()
    for i, sample in enumerate(samples(op))
]
SMOOTH = [param for param in SAMPLES if param.values[0].smooth]
SYMBOLIC = [param for param in SMOOTH if param.values[0].symbolic]
BFLOAT16 = [param for param in SMOOTH if "bfloat16" in param.values[0].dtypes]
#: Samples at a kink, which finite differences do not check.
KINKS = [param for param in SAMPLES if not param.values[0].smooth]
#: Samples per operator that are checked in every dtype outside of the long sweeps.
IN_EVERY_DTYPE = 1
#: Samples per operator that are checked at every order and against PyTorch, and with symbolic
#: shapes, outside of the long sweeps.
AT_EVERY_ORDER = 1
SYMBOLIC_AT_EVERY_ORDER = 1
#: Samples that TVM 0.26 lowers wrongly, by the test: at every order and dtype, in bfloat16, with
#: symbolic shapes.
FAILING = {
    "orders": """
        grad.adaptive_avg_pool3d_backward-0
        nn.adaptive_avg_pool2d-4 nn.adaptive_avg_pool3d-1 nn.adaptive_avg_pool3d-2
    """,
    "bfloat16": "grad.adaptive_avg_pool3d_backward-0",
    "symbolic": """
        grad.adaptive_avg_pool3d_backward-0 nn.adaptive_avg_pool2d-1 nn.adaptive_avg_pool3d-1
    """,
}
#: Samples that work although TVM 0.26 does not compile their operators: they contain no regions.
COMPILING = ("vision.roi_align-5",)


def number(param) -> int:
    """Return the number of a sample among those of its operator."""
    return int(param.id.rpartition("-")[2])


def with_failing(params: list, test: str) -> list:
    """Mark the samples that TVM 0.26 cannot lower."""

    def mark(p):
        if p.id in FAILING[test].split():
            return [UNEVEN_WINDOWS]
        is_region = p.values[0].op in ("relax.vision.roi_align", "relax.vision.roi_pool")
        return [REGIONS] if is_region and p.id not in COMPILING else []

    return [pytest.param(*p.values, id=p.id, marks=[*p.marks, *mark(p)]) for p in params]


def with_core(params: list) -> list:
    """Mark the first sample of each operator as numeric core, and the samples that TVM 0.26 cannot
    lower."""
    return [
        pytest.param(
            *p.values, id=p.id, marks=[*p.marks, *([pytest.mark.core] if number(p) == 0 else [])]
        )
        for p in with_failing(params, "orders")
    ]


def operator(param) -> str:
    """Return the operator of a sample."""
    return param.id.rpartition("-")[0]


def slow_from(params: list, limit: int) -> list:
    """Mark the samples of each operator from number ``limit`` on as part of the long sweeps."""
    slow = share_of_each([p for p in params if number(p) >= limit], operator)
    return [
        *(p for p in params if number(p) < limit),
        *(pytest.param(*p.values, id=p.id, marks=[*p.marks, pytest.mark.slow]) for p in slow),
    ]


def dtypes_of(sample) -> list[str]:
    """Return the dtypes of a sample that TVM's pass supports."""
    return [dtype for dtype in sample.dtypes if dtype != "bfloat16"]


@pytest.mark.parametrize("sample", with_core([p for p in SMOOTH if number(p) < IN_EVERY_DTYPE]))
def test_gradient_of_every_order_and_dtype(sample):
    """Check float64 to the sample's order, with type and mutation, and against PyTorch; other
    dtypes to first order.

    TVM's pass takes no parameters in bfloat16, so relax_grad's pass differentiates there.
    """
    sample.check(order=1, through="tvm", target=TARGET)
    cases = [sample.case(dtypes=dtypes_of(sample), through="tvm")]
    if "bfloat16" in sample.dtypes:
        cases.append(sample.case(order=1, dtypes=["bfloat16"]))
    with without_assertions():
        check_with_torch(sample, cases)


@pytest.mark.parametrize(
    "sample",
    slow_from(with_core([p for p in SMOOTH if number(p) >= IN_EVERY_DTYPE]), AT_EVERY_ORDER),
)
@without_assertions()
def test_gradient_of_every_order(sample):
    check_with_torch(sample, [sample.case(through="tvm")])


def check_with_torch(sample, cases: list) -> None:
    """Check a sample's cases, compiled together with its comparison with PyTorch, where there is
    one."""
    if sample.torch and importlib.util.find_spec("torch"):
        cases.append(sample.torch_case())
    with sample.within():
        check_many_gradients(cases, through="tvm", target=TARGET)


@pytest.mark.parametrize(
    "sample", slow_from(with_core([p for p in SMOOTH if number(p) >= IN_EVERY_DTYPE]), 0)
)
def test_dtypes(sample):
    sample.check(order=1, dtypes=dtypes_of(sample), through="tvm", target=TARGET)


@pytest.mark.parametrize(
    "sample",
    slow_from(with_failing([p for p in BFLOAT16 if number(p) >= IN_EVERY_DTYPE], "bfloat16"), 0),
)
@without_assertions()
def test_bfloat16(sample):
    sample.check(order=1, dtypes=["bfloat16"], target=TARGET)


@pytest.mark.slow
@pytest.mark.parametrize("sample", [p for p in SMOOTH if number(p) == 0])
@without_assertions()
def test_dtypes_to_second_order(sample):
    for dtype in sample.dtypes:
        through = "relax_grad" if dtype == "bfloat16" else "tvm"
        sample.check(dtype=dtype, order=min(sample.order, 2), through=through, target=TARGET)


@pytest.mark.slow
@pytest.mark.parametrize("op", sampled_operators())
@without_assertions()
def test_third_order(op):
    """The test takes the operator's first sample that is smooth and has a second derivative."""
    sample = next((s for s in samples(op) if s.smooth and (s.tvm_order or s.order) > 1), None)
    if sample is None:
        pytest.skip(f"no sample of {op} has a second derivative")
    sample.check(order=3, through="tvm", target=TARGET)


@pytest.mark.parametrize(
    "sample", slow_from(with_failing(SYMBOLIC, "symbolic"), SYMBOLIC_AT_EVERY_ORDER)
)
@without_assertions()
def test_symbolic_shapes(sample):
    sample.check(symbolic=True, through="tvm", target=TARGET)


@pytest.mark.parametrize(
    "sample", slow_from([p for p in SYMBOLIC if p.values[0].tvm_order is None], 0)
)
@without_assertions()
def test_symbolic_shapes_through_relax_grad(sample):
    sample.check(symbolic=True, target=TARGET)


@pytest.mark.parametrize("sample", [p for p in SMOOTH if p.values[0].tvm_order is not None])
@without_assertions()
def test_orders_that_tvm_does_not_take(sample):
    """relax_grad's pass takes them. TVM's must fail; otherwise the sample's limit is obsolete."""
    symbolic = sample.symbolic is not None
    assert sample.check(symbolic=symbolic, target=TARGET).order == sample.order
    unlimited = replace(sample, tvm_order=None)
    with pytest.raises((KeyError, tvm.error.InternalError)):
        unlimited.check(symbolic=symbolic, order=sample.tvm_order + 1, through="tvm", target=TARGET)


@pytest.mark.parametrize("sample", slow_from(KINKS, AT_EVERY_ORDER))
@without_assertions()
def test_same_as_torch_at_a_kink(sample, torch):
    check_many_against_torch([sample.torch_case()], through="tvm", target=TARGET)


@pytest.mark.parametrize("op", sampled_operators())
def test_a_kink_is_compared_with_torch(op):
    """A sample beyond the reach of finite differences must have another check."""
    for sample in samples(op):
        assert sample.smooth or sample.torch is not None
