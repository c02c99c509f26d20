"""Gradients of data movement over random shapes and attributes, and the refusals of the rules."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from sweep import TARGET, at_length, batches
from tvm import relax, tirx

from relax_grad import GradientError
from relax_grad.testing import TorchCase, check_gradients, check_many_against_torch

FEW = settings(max_examples=12, deadline=None, derandomize=True)


def normal(*shape):
    return np.random.default_rng(0).normal(size=shape)


def some_symbolic(shape, names):
    """Return names for some axes, if no axis is empty: TVM leaves a sum over an empty symbolic axis
    undefined."""
    if 0 in shape:
        return {}
    return {0: {axis: f"n{axis}" for axis, name in enumerate(names[: len(shape)]) if name}}


def tile_case(shape, repeats, names=()):
    return TorchCase(
        "relax.tile",
        [normal(*shape)],
        lambda torch, x: torch.tile(x, repeats),
        {"repeats": repeats},
        symbolic=some_symbolic(shape, names) if 0 not in repeats else {},
    )


def repeat_case(shape, repeats, axis, names=()):
    axis = None if axis is None or not shape else axis % len(shape) - len(shape) * (axis % 2)
    return TorchCase(
        "relax.repeat",
        [normal(*shape)],
        lambda torch, x: torch.repeat_interleave(x, repeats, axis),
        {"repeats": repeats, "axis": axis},
        symbolic=some_symbolic(shape, names) if repeats else {},
    )


def reshape_case(shape, dims):
    dims = [dim for dim in dims if dim < len(shape)]
    rest = int(np.prod([n for i, n in enumerate(shape) if i not in dims]))
    call = [*(shape[dim] for dim in dims), rest]
    return TorchCase(
        lambda x: relax.op.reshape(relax.op.flatten(x), relax.ShapeExpr(call)),
        [normal(*shape)],
        lambda torch, x: x.reshape(call),
    )


SHAPES = st.lists(st.integers(0, 3), max_size=4).map(tuple)
NAMES = st.lists(st.booleans(), max_size=4)
TILES = st.builds(tile_case, SHAPES, st.lists(st.integers(0, 3), max_size=5), NAMES)
REPEATS = st.builds(repeat_case, SHAPES, st.integers(0, 3), st.none() | st.integers(0, 7), NAMES)
RESHAPES = st.builds(
    reshape_case,
    st.lists(st.integers(1, 3), max_size=3).map(tuple),
    st.lists(st.integers(0, 2), unique=True, max_size=2),
)


@FEW
@given(TILES)
def test_tile(torch, case):
    check_many_against_torch([case])


@FEW
@given(REPEATS)
def test_repeat(torch, case):
    check_many_against_torch([case])


@FEW
@given(RESHAPES)
def test_reshape_of_flatten(torch, case):
    check_many_against_torch([case])


@pytest.mark.slow
@at_length(500)
@given(batches(TILES))
def test_tile_at_length(torch, batch):
    check_many_against_torch(batch, target=TARGET)


@pytest.mark.slow
@at_length(500)
@given(batches(REPEATS))
def test_repeat_at_length(torch, batch):
    check_many_against_torch(batch, target=TARGET)


@pytest.mark.slow
@at_length(200)
@given(batches(RESHAPES))
def test_reshape_of_flatten_at_length(torch, batch):
    check_many_against_torch(batch, target=TARGET)


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
    machine = relax.VirtualMachine(tvm.compile(module, target=TARGET), tvm.cpu())
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
    with pytest.raises(GradientError, match=r"relax\.squeeze.*needs axes"):
        relax.transform.Gradient("main")(bb.get())


def test_symbolic_batch_through_flatten_to_second_order():
    def forward(x):
        y = relax.op.expand_dims(relax.op.flatten(x), [0])
        return relax.op.multiply(relax.op.squeeze(y, [0]), relax.op.squeeze(y, [0]))

    check_gradients(forward, [normal(2, 3)], order=2, symbolic={0: {0: "n"}})


@pytest.mark.parametrize(
    "forward",
    [
        lambda x, n: relax.op.reshape(x, (n * 3,)),
        lambda x, n: relax.op.reshape(x, (-1,)),
        lambda x, n: relax.op.reshape(x, (3, n)),
        lambda x, n: relax.op.broadcast_to(x, (2, n, 3)),
        lambda x, n: relax.op.broadcast_to(relax.op.sum(x, [1], keepdims=True), (n, 3)),
        lambda x, n: relax.op.subtract(x, relax.op.full((n, 3), relax.op.max(x), "float64")),
    ],
    ids=["flat", "inferred", "turned", "broadcast", "broadcast back", "full"],
)
def test_symbolic_shapes_written_out_to_second_order(forward):
    """TVM's pass does not take such shapes at any order."""

    def cubes(x):
        y = forward(x, x.ty.shape[0])
        return relax.op.multiply(y, relax.op.multiply(y, y))

    check_gradients(cubes, [normal(4, 3)], order=2, symbolic={0: {0: "n"}})
