"""Gradients of scans: random shapes and zeros, many elements, half precision, and integers."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from sweep import TARGET, at_length, batches
from tvm import relax

from relax_grad import GradientError
from relax_grad.testing import TorchCase, check_many_against_torch


@st.composite
def cases(draw):
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    axis = draw(st.none() | st.integers(-len(shape), len(shape) - 1))
    return draw(st.sampled_from(["cumsum", "cumprod"])), shape, axis, draw(st.booleans())


def torch_scan(op, axis, exclusive):
    def scan(torch, x):
        along = 0 if axis is None else axis
        x = x.reshape(-1) if axis is None else x
        if exclusive:
            first = torch.full_like(x.narrow(along, 0, 1), op == "cumprod")
            x = torch.cat([first, x.narrow(along, 0, x.shape[along] - 1)], along)
        return getattr(x, op)(along)

    return scan


def torch_case(case):
    op, shape, axis, exclusive = case
    return TorchCase(
        f"relax.{op}",
        [np.random.default_rng(0).integers(-1, 3, shape).astype("float64")],
        torch_scan(op, axis, exclusive),
        {"axis": axis, "exclusive": exclusive},
    )


@settings(max_examples=12, deadline=None, derandomize=True)
@given(case=cases())
def test_scan(torch, case):
    check_many_against_torch([torch_case(case)])


@pytest.mark.slow
@at_length(200)
@given(batches(cases()))
def test_scan_at_length(torch, batch):
    check_many_against_torch(list(map(torch_case, batch)), target=TARGET)


def gradient(build, x):
    """Run the gradient of the sum of ``build(bb, x)``."""
    param = relax.Var("x", relax.TensorType(x.shape, x.dtype.name))
    bb = relax.BlockBuilder()
    with bb.function("main", [param]):
        with bb.dataflow():
            loss = bb.emit_output(relax.op.sum(bb.emit(build(bb, param))))
        bb.emit_func_output(loss)
    module = relax.transform.Gradient("main")(bb.get())
    machine = relax.VirtualMachine(tvm.compile(module, target=TARGET), tvm.cpu())
    return machine["main_adjoint"](tvm.runtime.tensor(x))[1][0].numpy()


def test_cumsum_of_half_precision_accumulates_in_float32():
    slope = gradient(lambda bb, x: relax.op.cumsum(x, 0), np.ones((4096, 1), "float16"))
    np.testing.assert_array_equal(slope[:, 0], np.arange(4096, 0, -1).astype("float16"))


def test_cumprod_of_half_precision_leaves_its_range():
    """The product 300 * 400 overflows float16. The gradients are the exact ones, rounded to
    float16."""
    x = np.array([300, 400, 1e-4, 2], "float16")
    slope = gradient(lambda bb, x: relax.op.cumprod(x, 0, exclusive=True), x)
    wide = x.astype("float64")
    a, b, c, _ = wide
    expected = [1 + b + b * c, a + a * c, a * b, 0]
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(slope, np.array(expected).astype("float16"), rtol=2e-3)


def test_cumprod_of_many_elements_with_a_zero():
    x = np.random.default_rng(0).uniform(0.9, 1.1, 1000)
    x[600] = 0
    slope = gradient(lambda bb, x: relax.op.cumprod(x, 0), x)
    at = np.random.default_rng(1).choice(1000, 5, replace=False)
    for i in (*at, 600):
        others = x.copy()
        others[i] = 1
        assert slope[i] == pytest.approx(others.cumprod()[i:].sum(), rel=1e-9)


@pytest.mark.parametrize("op", ["cumsum", "cumprod"])
def test_scans_through_integers_have_no_gradient(op):
    scan = getattr(relax.op, op)
    x = np.array([1.5, 2.5, 0.5], "float32")

    def rounded(bb, x):
        return relax.op.astype(bb.emit(scan(x, 0, "int32")), "float32")

    def of_integers(bb, x):
        return scan(bb.emit(relax.op.astype(x, "int32")), 0, "float32")

    assert not gradient(rounded, x).any()
    assert not gradient(of_integers, x).any()


@pytest.mark.parametrize("op", ["cumsum", "cumprod"])
def test_an_axis_that_does_not_exist_is_refused(op):
    with pytest.raises(GradientError, match=rf"relax.{op}.*axis must lie in \[-1, 1\).*it is 1"):
        gradient(lambda bb, x: getattr(relax.op, op)(x, 1), np.ones(3, "float32"))


def test_zeros_beside_products_out_of_range():
    """A product of the other factors overflows float32, and is then multiplied by 0."""
    x = np.array([1e13, 0, 0, 1e13, 1e13, 0, 1e13, 1e13, 1e13], "float32")
    for a in (x, x[::-1].copy()):
        assert not gradient(lambda bb, x: relax.op.prod(x), a).any()
    slope = gradient(lambda bb, x: relax.op.cumprod(x, 0), x)
    np.testing.assert_allclose(slope, [1, 1e13, 0, 0, 0, 0, 0, 0, 0], rtol=1e-6)
    one = np.array([1e13, 1e13, 1e13, 1e13, 0, 2], "float32")
    slope = gradient(lambda bb, x: relax.op.prod(x), one)
    np.testing.assert_array_equal(slope, [0, 0, 0, 0, np.inf, 0])
