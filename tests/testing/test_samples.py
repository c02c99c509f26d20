"""Every sample of every operator: orders, dtypes, symbolic shapes, and parity with PyTorch."""

from __future__ import annotations

import pytest

from relax_grad.testing import check_against_torch
from relax_grad.testing.samples import sampled_operators, samples

SAMPLES = [
    pytest.param(sample, id=f"{op.removeprefix('relax.')}-{i}")
    for op in sampled_operators()
    for i, sample in enumerate(samples(op))
]
SMOOTH = [param for param in SAMPLES if param.values[0].smooth]
#: Samples of an operator that are checked in every dtype outside of the long sweeps, which check all.
IN_EVERY_DTYPE = 3


@pytest.mark.parametrize("sample", SMOOTH)
def test_gradient_of_every_order(sample, request):
    """In float64 to the sample's order, which checks type and mutation too; some in the other dtypes."""
    number = int(request.node.callspec.id.rpartition("-")[2])
    sample.check(dtypes=sample.dtypes if number < IN_EVERY_DTYPE else ())


@pytest.mark.slow
@pytest.mark.parametrize("sample", SMOOTH)
def test_dtypes_of_every_order(sample):
    for dtype in sample.dtypes:
        sample.check(dtype=dtype, order=min(sample.order, 2))


@pytest.mark.slow
@pytest.mark.parametrize("op", sampled_operators())
def test_third_order(op):
    """Of the operator's first sample that is smooth and has a second derivative."""
    sample = next((s for s in samples(op) if s.smooth and s.order > 1), None)
    if sample is None:
        pytest.skip(f"no sample of {op} has a second derivative")
    sample.check(order=3)


@pytest.mark.parametrize("sample", [p for p in SMOOTH if p.values[0].symbolic])
def test_symbolic_shapes(sample):
    sample.check(symbolic=True)


@pytest.mark.parametrize("sample", [p for p in SAMPLES if p.values[0].torch])
def test_same_as_torch(sample, torch):
    check_against_torch(
        sample.function or sample.op, sample.inputs, sample.torch, wrt=sample.wrt, **sample.attrs
    )


@pytest.mark.parametrize("op", sampled_operators())
def test_a_kink_is_compared_with_torch(op):
    """A sample that finite differences say nothing about must be checked in some other way."""
    for sample in samples(op):
        assert sample.smooth or sample.torch is not None
