"""Errors of every backward operator that are raised before shapes are examined."""

from __future__ import annotations

import pytest
from calls import type_of
from tvm import relax
from tvm.ir import Op
from tvm.relax.op import grad as backward

from relax_grad.op import declare

DATA = relax.Var("data", relax.TensorType((2, 4, 9, 9), "float32"))
WEIGHT = relax.Var("weight", relax.TensorType((6, 4, 3, 3), "float32"))
OUTPUT_GRAD = relax.Var("output_grad", relax.TensorType((2, 6, 7, 7), "float32"))
SHAPE = relax.ShapeExpr([6, 4, 3, 3])
ATTRS = relax.op.nn.conv2d(DATA, WEIGHT).attrs


def weight_call(arguments=(OUTPUT_GRAD, DATA, SHAPE), attrs=ATTRS):
    return relax.Call(Op.get("relax.grad.conv2d_backward_weight"), list(arguments), attrs)


def test_the_type_of_a_valid_call():
    assert [int(dim) for dim in type_of(weight_call()).shape] == [6, 4, 3, 3]


def test_too_few_arguments():
    with pytest.raises(
        TypeError, match=r"conv2d_backward_weight takes.*output_grad, data, w.*has 2"
    ):
        type_of(weight_call([OUTPUT_GRAD, DATA]))


@pytest.mark.parametrize("attrs", [None, relax.op.nn.max_pool2d(DATA).attrs])
def test_missing_and_wrong_attributes(attrs):
    with pytest.raises(TypeError, match=r"conv2d_backward_weight needs.*Conv2DAttrs.*has"):
        type_of(weight_call(attrs=attrs))


def test_a_shape_in_the_place_of_a_tensor_and_the_reverse():
    with pytest.raises(TypeError, match="data must be a tensor"):
        type_of(weight_call([OUTPUT_GRAD, SHAPE, SHAPE]))
    with pytest.raises(TypeError, match="weight_shape must be a shape"):
        type_of(weight_call([OUTPUT_GRAD, DATA, WEIGHT]))


def test_shapes_that_do_not_match_are_shown_side_by_side():
    wrong = relax.Var("output_grad", relax.TensorType((2, 6, 7, 8), "float32"))
    with pytest.raises(
        ValueError,
        match=r"output_grad must have the shape \(2, 6, 7, 7\).*but it has \(2, 6, 7, 8\)",
    ):
        type_of(weight_call([wrong, DATA, SHAPE]))


def test_errors_of_the_forward_operator_name_the_backward_operator():
    with pytest.raises(
        ValueError, match=r"conv2d_backward_weight: .* fit relax\.nn\.conv2d.*channel"
    ):
        type_of(backward.conv2d_backward_weight(OUTPUT_GRAD, DATA, (6, 3, 3, 3)))


@pytest.mark.parametrize("name", ["strides", "dilation"])
@pytest.mark.parametrize("value", [0, -1])
def test_attributes_that_must_be_positive(name, value):
    with pytest.raises(ValueError, match=f"{name} must be positive, but it is"):
        type_of(backward.conv2d_backward_weight(OUTPUT_GRAD, DATA, SHAPE, **{name: value}))


def test_an_operator_is_declared_once():
    """A second declaration leaves the operator unchanged and sets the builder again."""
    builder = backward.conv2d_backward_weight
    before = Op.get("relax.grad.conv2d_backward_weight").get_attr("FInferType")
    declare.declare_op("conv2d_backward_weight", [], lambda call, ctx: None, builder)
    assert Op.get("relax.grad.conv2d_backward_weight").get_attr("FInferType").same_as(before)
    assert backward.conv2d_backward_weight is builder


def test_types_are_inferred_once():
    """Calls with equal attributes and types share a result. Others do not, and errors are not
    cached."""
    known, counts = declare.Inferred(), []

    def inferred(call):
        def infer_type():
            counts.append(call)
            if call.args[0].ty.ndim != 4:
                raise ValueError("of another rank")
            return call.args[0].ty

        return known.of(call, infer_type)

    def of(*arguments):
        return relax.Call(Op.get("relax.add"), list(arguments))

    other = relax.Var("other", DATA.ty)
    narrow = relax.Var("narrow", relax.TensorType((2, 4, 9, 8), "float32"))
    assert inferred(of(DATA, DATA)).same_as(inferred(of(other, DATA)))
    assert len(counts) == 1
    assert inferred(of(narrow, DATA)).same_as(narrow.ty)
    assert inferred(of(DATA, narrow)).same_as(DATA.ty)
    assert inferred(weight_call([DATA, DATA])).same_as(DATA.ty)
    assert len(counts) == 4
    flat = relax.Var("flat", relax.TensorType((2,), "float32"))
    for _ in range(2):
        with pytest.raises(ValueError, match="another rank"):
            inferred(of(flat))
    assert len(counts) == 6
    for _ in range(2):
        inferred(of(DATA, relax.Tuple([DATA])))
    assert len(counts) == 8


def test_few_inferred_types_are_kept(monkeypatch):
    """Short-lived types whose addresses are reused are never confused with each other."""
    monkeypatch.setattr(declare.Inferred, "MOST", 3)
    known = declare.Inferred()
    for i in range(200):
        x = relax.Var("x", relax.TensorType((i, 2), "float32"))
        call = relax.Call(Op.get("relax.nn.relu"), [x])
        assert int(known.of(call, lambda x=x: x.ty).shape.values[0]) == i
