"""Gradients of data movement over random shapes and attributes, and what the rules refuse."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax, tirx

from relax_grad import GradientError
from relax_grad.testing import check_against_torch, check_gradients

SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)
FEW = settings(max_examples=12, deadline=None, derandomize=True)
MANY = settings(max_examples=200, deadline=None)


def normal(*shape):
    return np.random.default_rng(0).normal(size=shape)


def check_tile(torch, shape, repeats):
    check_against_torch(
        "relax.tile", [normal(*shape)], lambda torch, x: torch.tile(x, repeats), repeats=repeats
    )


def check_repeat(torch, shape, repeats, axis):
    axis = None if axis is None or not shape else axis % len(shape) - len(shape) * (axis % 2)
    check_against_torch(
        "relax.repeat",
        [normal(*shape)],
        lambda torch, x: torch.repeat_interleave(x, repeats, axis),
        repeats=repeats,
        axis=axis,
    )


def check_reshape(torch, shape, dims):
    dims = [dim for dim in dims if dim < len(shape)]
    new_shape = [shape[dim] for dim in dims]
    rest = int(np.prod([n for i, n in enumerate(shape) if i not in dims]))
    call = [*new_shape, rest]

    def forward(x):
        return relax.op.reshape(relax.op.flatten(x), relax.ShapeExpr(call))

    if 0 not in shape:
        check_against_torch(forward, [normal(*shape)], lambda torch, x: x.reshape(call))


REPEATS = st.lists(st.integers(0, 3), max_size=4)
AXES = st.none() | st.integers(0, 5)


@FEW
@given(shape=SHAPES, repeats=REPEATS)
def test_tile(torch, shape, repeats):
    check_tile(torch, shape, repeats)


@FEW
@given(shape=SHAPES, repeats=st.integers(0, 3), axis=AXES)
def test_repeat(torch, shape, repeats, axis):
    check_repeat(torch, shape, repeats, axis)


@FEW
@given(shape=SHAPES, dims=st.lists(st.integers(0, 2), unique=True, max_size=2))
def test_reshape_of_flatten(torch, shape, dims):
    check_reshape(torch, shape, dims)


@pytest.mark.slow
@MANY
@given(shape=SHAPES, repeats=REPEATS)
def test_tile_many(torch, shape, repeats):
    check_tile(torch, shape, repeats)


@pytest.mark.slow
@MANY
@given(shape=SHAPES, repeats=st.integers(0, 3), axis=AXES)
def test_repeat_many(torch, shape, repeats, axis):
    check_repeat(torch, shape, repeats, axis)


@pytest.mark.slow
@MANY
@given(shape=SHAPES, dims=st.lists(st.integers(0, 2), unique=True, max_size=2))
def test_reshape_of_flatten_many(torch, shape, dims):
    check_reshape(torch, shape, dims)


def test_bias_gradient_in_half_precision_does_not_saturate():
    """The sum over the batch that a broadcast bias receives is taken in float32."""
    x = relax.Var("x", relax.TensorType((4096, 2), "float16"))
    bias = relax.Var("bias", relax.TensorType((2,), "float16"))
    bb = relax.BlockBuilder()
    with bb.function("main", [x, bias]):
        with bb.dataflow():
            y = bb.emit(relax.op.astype(relax.op.add(x, bias), "float32"))
            loss = bb.emit_output(relax.op.sum(y))
        bb.emit_func_output(loss)
    module = relax.transform.Gradient("main", [bias])(bb.get())
    machine = relax.VirtualMachine(tvm.compile(module, target="llvm"), tvm.cpu())
    values = [np.zeros((4096, 2), "float16"), np.zeros(2, "float16")]
    result = machine["main_adjoint"](*map(tvm.runtime.tensor, values))
    assert result[1][0].numpy().tolist() == [4096, 4096]


def test_squeeze_of_symbolic_axes_must_name_them():
    x = relax.Var("x", relax.TensorType([tirx.Var("n", "int64"), 1], "float32"))
    bb = relax.BlockBuilder()
    with bb.function("main", [x]):
        with bb.dataflow():
            loss = bb.emit_output(relax.op.sum(bb.emit(relax.op.squeeze(x))))
        bb.emit_func_output(loss)
    with pytest.raises(GradientError, match=r"relax\.squeeze.*name them"):
        relax.transform.Gradient("main")(bb.get())


def test_symbolic_batch_through_flatten_to_second_order():
    def forward(x):
        y = relax.op.expand_dims(relax.op.flatten(x), [0])
        return relax.op.multiply(relax.op.squeeze(y, [0]), relax.op.squeeze(y, [0]))

    check_gradients(forward, [normal(2, 3)], order=2, symbolic={0: {0: "n"}})
