"""The operators of recurrent layers: their types, and the calls that they refuse."""

from __future__ import annotations

import pytest
from calls import type_of
from tvm import relax, tirx
from tvm.relax.op import grad as backward
from tvm_ffi import structural_equal

T, B = (tirx.Var(name, "int64") for name in "tb")


def var(shape, dtype="float32"):
    return relax.Var("x", relax.TensorType(shape, dtype))


def of(*shapes):
    return relax.TupleType([relax.TensorType(shape, "float32") for shape in shapes])


def test_types_of_symbolic_steps_and_batch():
    states = [T, B, 3]
    lstm = backward.lstm(var([T, B, 12]), var([B, 3]), var([B, 3]), var([12, 3]))
    assert structural_equal(type_of(lstm), of(states, states, [T, B, 18]))
    gru = backward.gru(var([T, B, 9]), var([B, 3]), var([9, 3]), var([3]))
    assert structural_equal(type_of(gru), of(states, [T, B, 12], states))
    gru = backward.gru(var([T, B, 9]), var([B, 3]), var([9, 3]))
    assert structural_equal(type_of(gru), of(states, [T, B, 15]))
    call = backward.recurrent_backward(var(states), var([T, B, 15]), var([9, 3]))
    assert structural_equal(type_of(call), of([T, B, 9], states, [B, 3]))
    call = backward.recurrent_backward(var(states), var([T, B, 18]), var([12, 3]))
    assert structural_equal(type_of(call), of([T, B, 12], states, [B, 3], [B, 3]))
    call = backward.recurrent_backward(var(states), var(states), var([3, 3]))
    assert structural_equal(type_of(call), of(states, states, [B, 3]))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: backward.lstm(var([5, 2, 9]), var([2, 3]), var([2, 3]), var([12, 3])),
            r"grad\.lstm: data must have the shape \(5, 2, 12\), by the other arguments, but it "
            r"has \(5, 2, 9\)",
        ),
        (
            lambda: backward.lstm(var([T, 2, 12]), var([B, 3]), var([2, 3]), var([12, 3])),
            r"hidden must have the shape \(2, 3\)",
        ),
        (
            lambda: backward.gru(
                var([5, 2, 9]), var([2, 3]), var([9, 3], "float64"), var([3], "float64")
            ),
            "weight must have the dtype of data",
        ),
        (
            lambda: backward.rnn_tanh(*(var(s, "int32") for s in ([5, 2, 3], [2, 3], [3, 3]))),
            "data must be of floating-point numbers",
        ),
        (
            lambda: backward.rnn_relu(
                relax.Var("x", relax.TensorType(dtype="float32", ndim=3)), var([2, 3]), var([3, 3])
            ),
            "data must have 3 dimensions of known extents",
        ),
        (
            lambda: backward.recurrent_backward(var([5, 2, 3]), var([5, 2, 6]), var([9, 3])),
            r"slopes and weight must have the extents 6 .* but their shapes are \(5, 2, 6\) and "
            r"\(9, 3\)",
        ),
        (
            lambda: backward.recurrent_backward(
                var([5, 2, 3]), var([5, 2, 3]), var([3, 3]), var([5, 2, 3])
            ),
            "cells_grad must not be given: the slopes have 1 parts",
        ),
        (
            lambda: backward.recurrent_tangent(
                *map(var, ([5, 2, 12], [5, 2, 3], [2, 3], [5, 2, 18], [12, 3]))
            ),
            "cell must be given for an LSTM",
        ),
        (
            lambda: backward.previous_steps(var([5, 2, 3]), var([3, 2])),
            r"initial must have the shape \(2, 3\)",
        ),
        (lambda: backward.next_steps(var([])), "data must have an axis of steps"),
    ],
)
def test_refused_calls(call, message):
    with pytest.raises(ValueError, match=message):
        type_of(call())
