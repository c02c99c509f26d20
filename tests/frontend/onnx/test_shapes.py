"""Shapes of imported ONNX models: symbols, shapes that the model computes, and branches that they
decide."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import tvm
from tvm import relax

import relax_grad

onnx = pytest.importorskip("onnx", reason="the package onnx is not installed: extra onnx")

import onnx_models as models  # noqa: E402
from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from onnx_models import classifier, node, normal  # noqa: E402

from relax_grad.frontend.onnx import from_model  # noqa: E402


def test_a_symbolic_batch_keeps_its_name():
    model = classifier(batch="batch")
    imported = from_model(model)
    assert str(imported.outputs["y"].shape) == "R.shape([batch, 3])"
    run = models.compiled(imported.module)
    for count in (1, 3):
        x = normal(count, 3, 7, 7)
        (expected,) = models.wanted(model, {"x": x})
        np.testing.assert_allclose(run(x, *imported.values), expected, rtol=1e-4, atol=1e-5)


def test_shapes_and_symbols_can_be_given():
    imported = from_model(classifier(), shapes={"x": ("n", 3, 5, 6)})
    assert str(imported.inputs["x"].shape) == "R.shape([n, 3, 5, 6])"
    imported = from_model(classifier(), dynamic_shapes={"x": {0: "many"}})
    assert str(imported.outputs["y"].shape[0]) == "many"


@pytest.mark.parametrize("extent", [-1, 0, "?", "", "2*n"])
def test_an_unknown_extent_becomes_a_symbol(extent):
    model = classifier()
    dim = model.graph.input[0].type.tensor_type.shape.dim[0]
    if isinstance(extent, str):
        dim.dim_param = extent
    else:
        dim.dim_value = extent
    imported = from_model(model)
    assert isinstance(imported.inputs["x"].shape[0], tvm.tirx.Var)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shapes": {"z": (1,)}}, "shapes: the model has no input 'z'; its inputs are x"),
        ({"shapes": {"x": (1, 3)}}, r"shapes: x has 4 axes, but \(1, 3\) has 2"),
        ({"shapes": {"x": (0, 3, 7, 7)}}, "positive integers or names, but one is 0"),
        ({"dynamic_shapes": {"x": {4: "n"}}}, "x has 4 axes, and 4 is none of them"),
        ({"simplify": "maybe"}, 'simplify must be True, False or "auto"'),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        from_model(classifier(), **arguments)


def flattened(batch):
    """Return a model that computes a shape at run time, with casts, as exporters write it."""
    nodes = [
        node("Shape", ["x"], ["shape"]),
        node("Cast", ["shape"], ["narrow"], to=TensorProto.INT32),
        node("Slice", ["narrow", "zero", "one"], ["count"]),
        node("Concat", ["count", "rest"], ["wanted"], axis=0),
        node("Cast", ["wanted"], ["wide"], to=TensorProto.INT64),
        node("Reshape", ["x", "wide"], ["flat"]),
        node("Expand", ["bias", "wide"], ["row"]),
        node("Add", ["flat", "row"], ["sum"]),
        node("MatMul", ["sum", "w"]),
    ]
    integers = {name: np.array([value]) for name, value in (("zero", 0), ("one", 1))}
    integers["rest"] = np.array([12], "int32")
    return models.model_of(
        nodes,
        {"x": [batch, 3, 4]},
        {"bias": normal(1, 12), "w": normal(12, 2), **integers},
    )


@pytest.mark.parametrize("batch", [2, "n"])
def test_shapes_that_are_computed_are_folded(batch):
    model, x = flattened(batch), normal(2, 3, 4)
    imported = from_model(model)
    assert list(imported.params) == ["bias", "w"]
    assert not relax_grad.missing_gradients(imported.module, wrt=["bias", "w"])
    models.check_outputs(imported, model, {"x": x})


def sliced(end, step):
    """Return a model that makes a tensor of the extents ``[3:end:step]`` of its input."""
    nodes = [
        node("Shape", ["x"], ["shape"]),
        node("Slice", ["shape", "three", "end", "zero", "step"], ["wanted"]),
        node("ConstantOfShape", ["wanted"], ["ones"], value=numpy_helper.from_array(np.ones(1))),
        node("Identity", ["ones"]),
    ]
    integers = {"three": 3, "end": end, "zero": 0, "step": step}
    integers = {name: np.array([value]) for name, value in integers.items() if value is not None}
    return models.model_of(nodes, {"x": ["n", 3, 4, 5]}, integers, dtype="float64")


@pytest.mark.parametrize(
    ("end", "extents"), [(-(2**63), [5, 4, 3]), (-4, [5, 4, 3]), (0, [5, 4, 3]), (2**31 - 1, [])]
)
def test_a_shape_is_sliced_backwards(end, extents):
    model = sliced(end, -1)
    if end == -(2**63):  # beyond the symbolic extent
        model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 2
        extents = [*extents, 2]
    imported = from_model(model)
    assert [int(extent) for extent in imported.outputs["y"].shape] == extents


def test_a_shape_that_an_input_decides_is_not_folded(capfd):
    model = sliced(1, None)
    model.graph.input.append(helper.make_tensor_value_info("step", TensorProto.INT64, ["m"]))
    with pytest.raises(ValueError, match="cannot import the node Slice 'wanted'"):
        from_model(model)
    gc.collect()  # TVM would warn of a builder whose blocks are not ended
    output = capfd.readouterr()
    assert output.out + output.err == ""


def test_a_layer_normalisation_over_a_symbolic_axis():
    operator = node("LayerNormalization", ["x", "w"], axis=1)
    model, x = models.model_of([operator], {"x": [2, "n", 4]}, {"w": normal(1, 4)}), normal(2, 3, 4)
    models.check_outputs(from_model(model), model, {"x": x})


def test_a_branch_that_the_shapes_decide():
    def branch(kind):
        inner = [node("Constant", [], ["w"], value=numpy_helper.from_array(normal(3)))]
        inner.append(node(kind, ["x", "w"], ["z"]))
        output = helper.make_tensor_value_info("z", TensorProto.FLOAT, [2, 3])
        return helper.make_graph(inner, kind, [], [output])

    nodes = [
        node("Shape", ["x"], ["shape"]),
        node("Gather", ["shape", "index"], ["extent"]),
        node("Equal", ["extent", "two"], ["is_two"]),
        node("If", ["is_two"], ["a"], then_branch=branch("Mul"), else_branch=branch("Add")),
        node("Mul", ["a", "w"]),
    ]
    weights = {"index": np.array(0), "two": np.array(2), "w": normal(3)}
    model = models.model_of(nodes, {"x": [2, 3]}, weights)
    imported = from_model(model)
    assert len(imported.params) == 2  # that of the branch has the same name in the file
    assert "w" in imported.params
    models.check_outputs(imported, model, {"x": normal(2, 3)})


def test_branches_with_the_same_names():
    def branch(kind):
        inner = [node(kind, ["x", "w"], ["z"])]
        output = helper.make_tensor_value_info("z", TensorProto.FLOAT, [3])
        return helper.make_graph(
            inner, kind, [], [output], [numpy_helper.from_array(normal(3), "w")]
        )

    nodes = [
        node(
            "If", ["yes"], ["a"], then_branch=branch("Mul"), else_branch=branch("Add"), name="one"
        ),
        node("If", ["no"], ["b"], then_branch=branch("Mul"), else_branch=branch("Add"), name="two"),
        node("Mul", ["a", "b"]),
    ]
    model = models.model_of(nodes, {"x": [3]}, {"yes": np.array(True), "no": np.array(False)})
    imported = from_model(model)
    assert list(imported.params) == ["w", "two_w"]
    models.check_outputs(imported, model, {"x": normal(3)})


def test_a_fixed_input_decides_a_branch():
    def branch(name):
        inner = [node("Add", ["x", name], ["z"])]
        output = helper.make_tensor_value_info("z", TensorProto.FLOAT, [2, 3])
        initializer = [numpy_helper.from_array(normal(3), name)]
        return helper.make_graph(inner, name, [], [output], initializer)

    branches = {"then_branch": branch("wide.bias"), "else_branch": branch("narrow.bias")}
    nodes = [
        node("Equal", ["rate", "wide"], ["is_wide"]),
        node("If", ["is_wide"], **branches),
    ]
    model = models.model_of(nodes, {"x": [2, 3]}, {"wide": np.array(16000)})
    model.graph.input.append(helper.make_tensor_value_info("rate", TensorProto.INT64, []))
    for rate, name in ((16000, "wide.bias"), (8000, "narrow.bias")):
        imported = from_model(model, constants={"rate": rate})
        assert list(imported.inputs) == ["x"]
        assert list(imported.params) == [name]
        x = normal(2, 3)
        (expected,) = models.wanted(model, {"x": x, "rate": np.array(rate)})
        np.testing.assert_allclose(models.outputs(imported, {"x": x})[0], expected, rtol=1e-6)
    with pytest.raises(ValueError, match="constants: the model has no input 'sr'"):
        from_model(model, constants={"sr": 1})
    with pytest.raises(ValueError, match="constants: the value of rate has another shape"):
        from_model(model, constants={"rate": [1, 2]})


def test_a_folded_constant_is_no_weight():
    nodes = [
        node("ConstantOfShape", ["shape"], ["h"]),
        node("Expand", ["one", "shape"], ["ones"]),
        node("Add", ["x", "h"], ["a"]),
        node("Mul", ["a", "ones"], ["b"]),
        node("Mul", ["b", "w"]),
    ]
    weights = {"shape": np.array([2, 3]), "one": np.ones(1, "float32"), "w": normal(3)}
    model = models.model_of(nodes, {"x": [2, 3]}, weights)
    assert "h" not in from_model(model).params
    assert "w" in from_model(model).params


def test_a_loss_of_an_output_whose_extent_is_an_expression():
    model = models.model_of(
        [node("MatMul", ["x", "w"], ["a"]), node("Reshape", ["a", "shape"])],
        {"x": ["batch", "steps", 4]},
        {"w": normal(4, 4), "shape": np.array([-1, 2])},
    )
    imported = from_model(model)

    def loss(bb, y, weights):
        products = bb.emit(relax.op.multiply(relax.op.sum(relax.op.multiply(y, y)), weights))
        return bb.emit(relax.op.sum(products))

    module = imported.with_loss(loss, {"weights": (("batch",), "float32")})
    module = relax_grad.value_and_grad(module, "loss", wrt="w")
    x, scales = normal(3, 5, 4), np.array([1, 2, 4], "float32")
    call = models.compiled(module, "loss_adjoint")
    value, (gradient,) = call(x, scales, *imported.values)
    rows, w = x.reshape(-1, 4), imported.params["w"].numpy()
    np.testing.assert_allclose(value, 7 * np.square(rows @ w).sum(), rtol=1e-5)
    np.testing.assert_allclose(gradient, 14 * rows.T @ rows @ w, rtol=1e-5, atol=1e-4)
