"""Gradients of sorting: random shapes with ties, and cases that TVM sorts wrongly."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sweep import TARGET, at_length, batches
from tvm import relax

from relax_grad import GradientError
from relax_grad.testing import TorchCase, check_many_against_torch


@st.composite
def cases(draw):
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    k = draw(st.none() | st.sampled_from([-1, *range(1, shape[axis] + 1)]))
    return shape, axis, k, draw(st.booleans())


def torch_case(case):
    """Return the case of topk, or of sort if k is None. The first of equal elements comes first."""
    shape, axis, k, down = case
    x = np.random.default_rng(0).integers(0, 3, shape).astype("float64")
    extent = shape[axis] if k in (None, -1) else k

    def expected(torch, x):
        return torch.sort(x, stable=True, dim=axis, descending=down).values.narrow(axis, 0, extent)

    if k is None:
        return TorchCase("relax.sort", [x], expected, {"axis": axis, "descending": down})
    return TorchCase("relax.topk", [x], expected, {"k": k, "axis": axis, "largest": down})


@settings(max_examples=12, deadline=None, derandomize=True)
@given(case=cases())
def test_sorting(torch, case):
    check_many_against_torch([torch_case(case)])


@pytest.mark.slow
@at_length(200)
@given(batches(cases()))
def test_sorting_at_length(torch, batch):
    check_many_against_torch(list(map(torch_case, batch)), target=TARGET)


def differentiate(build, shape=(3,)):
    x = relax.Var("x", relax.TensorType(shape, "float32"))
    bb = relax.BlockBuilder()
    with bb.function("main", [x]):
        with bb.dataflow():
            loss = bb.emit_output(relax.op.sum(bb.emit(build(bb, x))))
        bb.emit_func_output(loss)
    return relax.transform.Gradient("main")(bb.get())


@pytest.mark.parametrize(
    ("build", "shape", "message"),
    [
        (
            lambda bb, x: relax.op.topk(x, 4, ret_type="values"),
            (3,),
            r"relax.topk.*k must not be larger than the extent 3.*it is 4.*; k=-1 takes all",
        ),
        (lambda bb, x: relax.op.sort(x, 1), (3,), r"relax.sort.*axis must lie in \[-1, 1\)"),
        (lambda bb, x: relax.op.sort(x), (), r"relax.sort.*a tensor of 0 dimensions"),
        (
            lambda bb, x: relax.op.astype(
                bb.emit(relax.op.sort(bb.emit(relax.op.astype(x, "bfloat16")))), "float32"
            ),
            (3,),
            r"relax.sort.*TVM sorts bfloat16 wrongly; cast to float32",
        ),
    ],
    ids=["more than there are", "no such axis", "0-d", "bfloat16"],
)
def test_sorts_that_tvm_gets_wrong_are_refused(build, shape, message):
    with pytest.raises(GradientError, match=message):
        differentiate(build, shape)


def test_indices_alone_have_no_gradient():
    module = differentiate(
        lambda bb, x: relax.op.astype(bb.emit(relax.op.topk(x, 2, ret_type="indices")), "float32")
    )
    assert "gather_elements_backward" not in module.script()
