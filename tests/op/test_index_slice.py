"""The backward operators of strided slices: builders, type inference and round trips."""

from __future__ import annotations

import pytest
from calls import build, check_round_trip, same, type_of, var
from tvm import relax, tirx
from tvm.relax.op import grad as backward
from tvm.script import ir as I  # noqa: F401  (scripts name it)


def bounds(rank=3):
    return [var(name, (rank,), "int64") for name in ("begin", "end", "strides")]


def static(grad=None, shape=(4, 5, 2), **attrs):
    slices = {"axes": [1], "begin": [-4], "end": [9], "strides": [2], **attrs}
    grad = var("dy", (4, 2, 2)) if grad is None else grad
    return backward.strided_slice_backward_data(grad, shape, **slices)


def dynamic(grad=None, shape=(4, 5, 2), slices=None):
    grad = var("dy", ndim=3) if grad is None else grad
    return backward.dynamic_strided_slice_backward_data(grad, shape, *(slices or bounds()))


def module(call, params):
    return build(params, lambda *_: call)


def modules(n):
    grad, x, slices = var("dy", (n, 2, 2)), var("x", (n, 5, 2)), bounds()
    unknown = var("dy", ndim=3)
    return {
        "strided_slice": module(static(grad, (n, 5, 2)), [grad, x]),
        "strided_slice, inbound": module(
            static(grad, relax.op.shape_of(x), begin=[1], end=[5], assume_inbound=True), [grad, x]
        ),
        "dynamic_strided_slice": module(dynamic(grad, (n, 5, 2), slices), [grad, x, *slices]),
        "dynamic_strided_slice, unknown": module(
            dynamic(unknown, relax.op.shape_of(x), slices), [unknown, x, *slices]
        ),
    }


EXTENTS = {"static": lambda: 4, "symbolic": lambda: tirx.Var("n", "int64")}


@pytest.mark.parametrize("extent", EXTENTS)
@pytest.mark.parametrize("case", modules(4))
def test_round_trips(case, extent):
    check_round_trip(
        modules(EXTENTS[extent]())[case], f"grad.{case.partition(',')[0]}_backward_data"
    )


def test_result_has_the_given_shape_and_the_dtype_of_output_grad():
    half = relax.TensorType((4, 5, 2), "float16")
    assert same(type_of(static(var("dy", (4, 2, 2), "float16"))), half)
    assert same(type_of(dynamic(var("dy", dtype="float16", ndim=3))), half)


def test_symbolic_begin():
    n, k = (tirx.Var(name, "int64") for name in "nk")
    x = var("x", (n, 3))
    forward = type_of(relax.op.strided_slice(x, [0], [k], [n], [2]))
    call = static(relax.Var("dy", forward), (n, 3), axes=[0], begin=[k], end=[n])
    assert same(type_of(call), x.ty)


def test_unknown_shapes():
    shape = relax.Var("s", relax.ShapeType(ndim=3))
    rank3 = relax.TensorType(dtype="float32", ndim=3)
    assert same(type_of(static(var("dy"), shape)), rank3)
    assert same(type_of(dynamic(var("dy"), shape)), rank3)


@pytest.mark.parametrize("shape", [(4, 3, 2), (4, 5, 2), (3, 2, 2)], ids=str)
def test_wrong_shape_of_output_grad(shape):
    with pytest.raises(ValueError, match=r"strided_slice_backward_data: output_grad .*\(4, 2, 2\)"):
        type_of(static(var("dy", shape)))


@pytest.mark.parametrize("operator", [static, dynamic])
def test_wrong_rank_of_output_grad(operator):
    with pytest.raises(
        ValueError, match=r"slice_backward_data: output_grad must have 3 dimensions"
    ):
        type_of(operator(var("dy", (4, 2))))


def test_arguments_invalid_for_the_forward_operators_are_refused():
    with pytest.raises(ValueError, match="axis"):
        type_of(static(axes=[3]))
    with pytest.raises(
        ValueError, match=r"relax\.grad\.strided_slice_backward_data: .*same length"
    ):
        static(begin=[1, 2])
    with pytest.raises(ValueError, match=r"relax\.grad\.dynamic.*number of indices"):
        type_of(dynamic(slices=bounds(2)))


def test_arguments_of_the_wrong_kind():
    shape = relax.Var("s", relax.ShapeType(ndim=3))
    with pytest.raises(TypeError, match=": output_grad must be a tensor"):
        type_of(static(shape))
    with pytest.raises(TypeError, match=": data_shape must be a shape"):
        type_of(static(shape=var("x", (4, 5, 2))))
    begin, _, strides = bounds()
    with pytest.raises(TypeError, match=": axes must be a tuple of integers"):
        type_of(
            relax.Call(static().op, [*static().args[:2], shape, *static().args[3:]], static().attrs)
        )
    with pytest.raises(TypeError, match=": end must be a tensor"):
        type_of(dynamic(slices=[begin, shape, strides]))


@pytest.mark.parametrize("operator", [static, dynamic])
def test_operators_are_pure(operator):
    assert operator().op.get_attr("FPurity")
