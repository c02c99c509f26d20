"""Gradients of reordering: random index maps and lengths, and the refusals of the rules."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import build, run, tensor
from sweep import TARGET, at_length, batches
from tvm import relax, tirx

from relax_grad import GradientError
from relax_grad.testing import TorchCase, check_many_against_torch
from relax_grad.transform import Gradient

FEW = settings(max_examples=10, deadline=None, derandomize=True)


def normal(*shape):
    return np.random.default_rng(0).normal(size=shape)


def layout_transform_case(shape, factor, outer, swapped):
    """Return a case that splits the last axis, padded to a multiple of the factor, and permutes its
    parts."""

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

    attrs = {"index_map": index_map, "pad_value": 3.0}
    return TorchCase("relax.layout_transform", [normal(*shape)], forward, attrs)


def reverse_sequence_case(lengths, extent, dtype):
    def forward(torch, x, lengths):
        rows = [
            torch.cat([row[:n].flip(0), row[n:]])
            for row, n in zip(x, lengths.clamp(min=0).tolist(), strict=True)
        ]
        return torch.stack(rows)

    inputs = [normal(len(lengths), extent), np.array(lengths, dtype)]
    attrs = {"seq_axis": -1, "batch_axis": 0}
    return TorchCase("relax.reverse_sequence", inputs, forward, attrs)


LAYOUTS = st.builds(
    layout_transform_case,
    shape=st.tuples(st.integers(1, 3), st.integers(1, 7)),
    factor=st.integers(1, 4),
    outer=st.booleans(),
    swapped=st.booleans(),
)
SEQUENCES = st.builds(
    reverse_sequence_case,
    lengths=st.lists(st.integers(-2, 6), min_size=1, max_size=4),
    extent=st.integers(1, 4),
    dtype=st.sampled_from(["int32", "int64"]),
)


@FEW
@given(LAYOUTS)
def test_layout_transform(torch, case):
    check_many_against_torch([case])


@FEW
@given(SEQUENCES)
def test_reverse_sequence(torch, case):
    check_many_against_torch([case])


@pytest.mark.slow
@at_length(200)
@given(batches(LAYOUTS))
def test_layout_transform_at_length(torch, batch):
    check_many_against_torch(batch, target=TARGET)


@pytest.mark.slow
@at_length(200)
@given(batches(SEQUENCES))
def test_reverse_sequence_at_length(torch, batch):
    check_many_against_torch(batch, target=TARGET)


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


@pytest.mark.parametrize("channels", [8, 7, 3, 0])
def test_pixel_shuffle_of_a_symbolic_number_of_channels(channels):
    """TVM's type inference ends the process. Channels that are left over do not influence the
    result."""
    c = tirx.Var("c", "int64")
    x = tensor("x", (1, c, 2, 3))
    module = build(
        [x], lambda bb, x: relax.op.sum(relax.op.square(relax.op.nn.pixel_shuffle(x, 2)))
    )
    values = normal(1, channels, 2, 3)
    _, (slope,) = run(Gradient("main")(module), "main_adjoint", values)
    wanted = 2 * values
    wanted[:, channels // 4 * 4 :] = 0
    np.testing.assert_allclose(slope, wanted)


def test_pixel_shuffle_of_a_shape_that_is_a_variable():
    shape = relax.Var("shape", relax.ShapeType(ndim=4))
    x = relax.Var("x", relax.TensorType(shape, "float32"))
    result_type = relax.BlockBuilder().normalize(relax.op.nn.pixel_shuffle(x, 2)).ty
    assert (result_type.ndim, result_type.shape, str(result_type.dtype)) == (4, None, "float32")
