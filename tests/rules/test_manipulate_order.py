"""Gradients of reordering: random index maps and lengths, and what the rules refuse."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax

from relax_grad import GradientError
from relax_grad.testing import check_against_torch

FEW = settings(max_examples=10, deadline=None, derandomize=True)
MANY = settings(max_examples=200, deadline=None)


def normal(*shape):
    return np.random.default_rng(0).normal(size=shape)


def check_layout_transform(torch, shape, factor, outer, swapped):
    """Split the last axis, padded to a multiple of the factor, and move its parts about."""

    def index_map(i, j):
        head, tail = j // factor, j % factor
        result = [tail, i, head] if outer else [i, head, tail]
        return result[::-1] if swapped else result

    def forward(torch, x):
        rows, columns = shape
        x = torch.nn.functional.pad(x, (0, -columns % factor), value=3.0)
        x = x.reshape(rows, -1, factor)
        x = x.permute(2, 0, 1) if outer else x
        return x.permute(2, 1, 0) if swapped else x

    check_against_torch(
        "relax.layout_transform",
        [normal(*shape)],
        forward,
        index_map=index_map,
        pad_value=3.0,
    )


def check_reverse_sequence(torch, lengths, extent, dtype):
    def forward(torch, x, lengths):
        rows = [
            torch.cat([row[:n].flip(0), row[n:]])
            for row, n in zip(x, lengths.clamp(min=0).tolist(), strict=True)
        ]
        return torch.stack(rows)

    inputs = [normal(len(lengths), extent), np.array(lengths, dtype)]
    check_against_torch("relax.reverse_sequence", inputs, forward, seq_axis=-1, batch_axis=0)


LAYOUTS = {
    "shape": st.tuples(st.integers(1, 3), st.integers(1, 7)),
    "factor": st.integers(1, 4),
    "outer": st.booleans(),
    "swapped": st.booleans(),
}
SEQUENCES = {
    "lengths": st.lists(st.integers(-2, 6), min_size=1, max_size=4),
    "extent": st.integers(1, 4),
    "dtype": st.sampled_from(["int32", "int64"]),
}


@FEW
@given(**LAYOUTS)
def test_layout_transform(torch, shape, factor, outer, swapped):
    check_layout_transform(torch, shape, factor, outer, swapped)


@FEW
@given(**SEQUENCES)
def test_reverse_sequence(torch, lengths, extent, dtype):
    check_reverse_sequence(torch, lengths, extent, dtype)


@pytest.mark.slow
@MANY
@given(**LAYOUTS)
def test_layout_transform_many(torch, shape, factor, outer, swapped):
    check_layout_transform(torch, shape, factor, outer, swapped)


@pytest.mark.slow
@MANY
@given(**SEQUENCES)
def test_reverse_sequence_many(torch, lengths, extent, dtype):
    check_reverse_sequence(torch, lengths, extent, dtype)


def test_reverse_sequence_refuses_one_axis_for_both():
    x = relax.Var("x", relax.TensorType((3, 2), "float32"))
    lengths = relax.Var("lengths", relax.TensorType((3,), "int64"))
    bb = relax.BlockBuilder()
    with bb.function("main", [x, lengths]):
        with bb.dataflow():
            y = bb.emit(relax.op.reverse_sequence(x, lengths, seq_axis=0, batch_axis=-2))
            loss = bb.emit_output(relax.op.sum(y))
        bb.emit_func_output(loss)
    with pytest.raises(GradientError, match=r"relax\.reverse_sequence.*two axes"):
        relax.transform.Gradient("main", [x])(bb.get())
