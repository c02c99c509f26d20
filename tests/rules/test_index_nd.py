"""Gradients of reads at points: random indices, including those without an element."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from indices import point_pairs, points, points_of, read_with_torch, tensors
from sweep import TARGET, at_length, batches

from relax_grad.testing import TorchCase, check_many_against_torch


def gather_nd_case(case):
    shape, at, batch_dims = case
    result_shape = (*at.shape[:-1], *shape[batch_dims + at.shape[-1] :])
    return TorchCase(
        "relax.gather_nd",
        [np.random.default_rng(0).normal(size=shape), at],
        read_with_torch(point_pairs(shape, at, batch_dims), result_shape),
        {"batch_dims": batch_dims},
    )


def index_tensor_case(case):
    shape, indices = case
    at = points_of(indices)
    result_shape = (*at.shape[:-1], *shape[at.shape[-1] :])
    return TorchCase(
        "relax.index_tensor",
        [np.random.default_rng(0).normal(size=shape), tuple(indices)],
        read_with_torch(point_pairs(shape, at), result_shape),
    )


#: TVM takes no other dtype of indices here.
POINTS = points(batched=True, dtypes=("int64",))
TENSORS = tensors(dtypes=("int64", "int32", "int8"))


@settings(max_examples=2, deadline=None, derandomize=True)
@given(batches(st.tuples(POINTS, TENSORS), 4))
def test_reads(torch, batch):
    cases = [case for nd, at in batch for case in (gather_nd_case(nd), index_tensor_case(at))]
    check_many_against_torch(cases)


@pytest.mark.slow
@at_length(600)
@given(batches(POINTS))
def test_gather_nd_at_length(torch, batch):
    check_many_against_torch(list(map(gather_nd_case, batch)), target=TARGET)


@pytest.mark.slow
@at_length(600)
@given(batches(TENSORS))
def test_index_tensor_at_length(torch, batch):
    check_many_against_torch(list(map(index_tensor_case, batch)), target=TARGET)
