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
#: How many samples of an operator are checked in every dtype outside of the long sweeps.
IN_EVERY_DTYPE = 3


def number(param) -> int:
    """The number of a sample among those of its operator."""
    return int(param.id.rpartition("-")[2])


@pytest.mark.parametrize("sample", [p for p in SMOOTH if number(p) < IN_EVERY_DTYPE])
def test_gradient_of_every_order_and_dtype(sample):
    """In float64 to the sample's order, which checks type and mutation too; in the others to the first."""
    sample.check(dtypes=sample.dtypes)


@pytest.mark.parametrize("sample", [p for p in SMOOTH if number(p) >= IN_EVERY_DTYPE])
def test_gradient_of_every_order(sample):
    sample.check()


@pytest.mark.slow
@pytest.mark.parametrize("sample", [p for p in SMOOTH if number(p) >= IN_EVERY_DTYPE])
def test_dtypes(sample):
    sample.check(order=1, dtypes=sample.dtypes)


@pytest.mark.slow
@pytest.mark.parametrize("sample", [p for p in SMOOTH if number(p) == 0])
def test_dtypes_to_second_order(sample):
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
