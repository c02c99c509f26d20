"""The properties of a call that a backend reads."""

from __future__ import annotations

import pytest
from tvm import relax, tirx
from tvm.relax.op import grad as backward

from relax_grad.backend import BackwardCall


def tensor(name, *shape, dtype="float32"):
    return relax.Var(name, relax.TensorType(shape, dtype))


def described(call):
    return BackwardCall.of(relax.BlockBuilder().normalize(call))


def weight_call(batch=2, dtype="float16"):
    output_grad, data = tensor("g", batch, 6, 5, 5), tensor("x", batch, 4, 7, 7, dtype=dtype)
    return backward.conv2d_backward_weight(output_grad, data, (6, 4, 3, 3), out_dtype="float64")


def test_description_of_a_call():
    call = described(weight_call())
    assert call.op_name == "relax.grad.conv2d_backward_weight"
    assert list(call.arguments) == ["output_grad", "data", "weight_shape"]
    assert call.attrs == {
        "strides": (1, 1),
        "padding": (0, 0, 0, 0),
        "dilation": (1, 1),
        "groups": 1,
        "data_layout": "NCHW",
        "kernel_layout": "OIHW",
        "out_layout": "NCHW",
        "out_dtype": "float64",
    }
    assert {type(value) for value in call.attrs["strides"]} == {int}
    assert [call.dtype(name) for name in ("output_grad", "data")] == ["float32", "float16"]
    assert call.dtype() == call.dtype("root") == "float64"
    assert call.shape("data") == (2, 4, 7, 7)
    assert call.shape() == call.shape("weight_shape") == (6, 4, 3, 3)
    assert call.is_static()
    assert call.parameters == {}


def test_symbolic_and_unknown_shapes():
    n = tirx.Var("n", "int64")
    call = described(weight_call(n))
    assert call.shape("data")[0].same_as(n)
    assert call.shape("data")[1:] == (4, 7, 7)
    assert not call.is_static()
    unknown = relax.Var("x", relax.TensorType(dtype="float32", ndim=4))
    call = described(backward.conv2d_backward_weight(unknown, unknown, (6, 4, 3, 3)))
    assert call.shape("data") is None
    assert not call.is_static()


def test_an_argument_that_does_not_exist():
    with pytest.raises(
        ValueError, match="no argument 'weight'; its arguments are output_grad, data, weight_shape"
    ):
        described(weight_call()).shape("weight")


def test_of_a_function_without_a_backward_operator():
    x = tensor("x", 2)
    bb = relax.BlockBuilder()
    with bb.function("main", [x]):
        bb.emit_func_output(bb.emit(relax.op.exp(x)))
    with pytest.raises(ValueError, match=r"main must hold one call .* but it holds 0"):
        BackwardCall.of_function(bb.get()["main"])


def test_one_parameter_for_two_arguments():
    x = tensor("x", 1, 2, 4, 4)
    bb = relax.BlockBuilder()
    with bb.function("main", [x]):
        bb.emit_func_output(bb.emit(backward.conv2d_backward_weight(x, x, (2, 2, 1, 1))))
    parameters = BackwardCall.of_function(bb.get()["main"]).parameters
    assert parameters == {"output_grad": 0, "data": 0}
