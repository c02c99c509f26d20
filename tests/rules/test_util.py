"""The helpers that rules share."""

from __future__ import annotations

import pytest
from tvm import relax, tirx

from relax_grad.errors import GradientError
from relax_grad.rules import _util

N = tirx.Var("n", "int64")


def tensor(*shape, dtype="float32"):
    return relax.Var("x", relax.TensorType(shape, dtype))


def type_of(*, of, uses):
    """Return the type of an expression over some variables."""
    bb = relax.BlockBuilder()
    with bb.function("main", uses):
        result = bb.emit(of)
        bb.emit_func_output(result)
    return result.ty


def test_shape_of_needs_a_known_shape():
    assert _util.shape_of(tensor(N, 3))[0].same_as(N)
    with pytest.raises(GradientError, match=r"must be known.*match_cast"):
        _util.shape_of(relax.Var("x", relax.TensorType(dtype="float32", ndim=2)))


@pytest.mark.parametrize(("shape", "static"), [((2, 3), True), ((), True), ((N, 3), False)])
def test_shape_arg_is_written_out_or_read_off(shape, static):
    x = tensor(*shape)
    assert _util.is_static(x) is static
    argument = _util.shape_arg(x)
    assert isinstance(argument, relax.ShapeExpr if static else relax.Call)
    assert len(type_of(of=argument, uses=[x]).values) == len(shape)


@pytest.mark.parametrize(
    ("grad", "like"), [((4, 2, 3), (3,)), ((4, 2, 3), (2, 1)), ((N, 5), (5,)), ((N, 5), (N, 1))]
)
def test_unbroadcast_returns_the_shape_of_the_argument(grad, like):
    bb, grad, like = relax.BlockBuilder(), tensor(*grad), tensor(*like)
    result = type_of(of=_util.unbroadcast(bb, grad, like), uses=[grad, like])
    assert _util.same_shape(list(result.shape.values), _util.shape_of(like))


def test_unbroadcast_keeps_a_gradient_of_the_same_shape():
    bb, grad = relax.BlockBuilder(), tensor(N, 5)
    assert _util.unbroadcast(bb, grad, tensor(N, 5)).same_as(grad)


@pytest.mark.parametrize(("grad", "like"), [((3,), (2, 3)), ((1, 1), (N, 4)), ((), (N,))])
def test_broadcast_like_returns_the_shape_of_the_argument(grad, like):
    grad, like = tensor(*grad), tensor(*like)
    result = type_of(of=_util.broadcast_like(grad, like), uses=[grad, like])
    assert _util.same_shape(list(result.shape.values), _util.shape_of(like))


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [("float16", "float32"), ("bfloat16", "float32"), ("float32", "float32"), ("float64",) * 2],
)
def test_half_precision_is_widened_and_cast_back(dtype, wide):
    x = tensor(2, dtype=dtype)
    assert _util.wide_dtype(x) == wide
    widened = relax.BlockBuilder().normalize(_util.widen(x))
    assert _util.dtype_of(widened) == wide
    assert _util.widen(x).same_as(x) == (dtype == wide)
    ctx = relax.BlockBuilder()
    narrowed = ctx.normalize(_util.cast_like(ctx, relax.Var("y", widened.ty), x))
    assert _util.dtype_of(narrowed) == dtype
