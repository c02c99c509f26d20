"""ONNX models as modules: names and roles of parameters, values by ONNX's evaluator, gradients by
differences."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from tvm import relax

import relax_grad
from relax_grad import _packages

onnx = pytest.importorskip("onnx", reason="the package onnx is not installed: extra onnx")

import onnx_models as models  # noqa: E402
from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from onnx_models import WEIGHTS, classifier, node, normal  # noqa: E402

from relax_grad.frontend.onnx import UnsupportedOperatorError, from_model  # noqa: E402


def test_weights_are_parameters_under_their_names():
    imported = from_model(classifier())
    assert list(imported.params) == WEIGHTS
    assert list(imported.frozen) == ["mean", "var"]
    assert not imported.states
    main = imported.module["main"]
    assert [param.name for param in main.params] == ["x", *WEIGHTS, "mean", "var"]
    assert int(main.attrs["num_input"]) == 1
    assert list(imported.inputs) == ["x"]
    assert list(imported.outputs) == ["y"]
    assert imported.params["dense.weight"].shape == (
        5,
        4,
    )  # as in the file, though the node transposes it


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_network_has_onnx_values(dtype):
    model, x = classifier(dtype), normal(2, 3, 7, 7, dtype=dtype)
    models.check_outputs(from_model(model), model, {"x": x})


def test_a_network_in_half_precision():
    model, x = classifier("float16"), normal(2, 3, 7, 7, dtype="float16")
    models.check_outputs(from_model(model), model, {"x": x}, rtol=2e-2, atol=2e-2)


def test_the_gradient_of_every_parameter():
    imported = from_model(classifier("float64"))
    models.check_parameter_gradients(imported, {"x": normal(2, 3, 7, 7, dtype="float64")})


def test_a_path_and_bytes(tmp_path):
    model = classifier()
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    for source in (path, str(path), model.SerializeToString()):
        assert list(from_model(source).params) == WEIGHTS
    with pytest.raises(TypeError, match=r"must be a path, bytes or an onnx.ModelProto"):
        from_model(3)
    with pytest.raises(ValueError, match="no ONNX model with outputs"):
        from_model(onnx.ModelProto())


def test_the_model_is_left_as_it_is():
    model = classifier()
    before = model.SerializeToString(deterministic=True)
    from_model(model, shapes={"x": (1, 3, 9, 9)})
    assert model.SerializeToString(deterministic=True) == before


# Which constants are parameters


@pytest.mark.parametrize(
    ("trainable", "names"),
    [
        ("last", ["last"]),
        (["dense.*", "last"], ["dense.weight", "dense.bias", "last"]),
        (lambda name: name.startswith("conv"), ["conv.weight", "conv.bias"]),
        ([], []),
    ],
)
def test_trainable_selects(trainable, names):
    imported = from_model(classifier(), trainable=trainable)
    assert list(imported.params) == names
    assert set(imported.frozen) == {*WEIGHTS, "mean", "var"} - {*names}
    order = [param.name for param in imported.module["main"].params]
    assert order == ["x", *imported.params, *imported.frozen]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("low", "low is a shape, a bound or a scale of the node c, which stays a constant"),
        ("mean", "mean is a running statistic"),
        ("none.*", r"no weight matches 'none.\*'; there are "),
    ],
)
def test_trainable_names_no_weight(name, message):
    with pytest.raises(ValueError, match=message):
        from_model(classifier(), trainable=[name])


def test_constant_nodes_count_and_their_scalars_do_not():
    def constant(name, value):
        return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(value))

    def nodes():
        return [
            constant("weight", normal(3, 4)),
            constant("three", np.array([3], "float32")),
            constant("bias", normal(1)),
            helper.make_node("Constant", [], ["half"], value_float=0.5),
            node("MatMul", ["x", "weight"], ["a"]),
            node("Add", ["a", "three"], ["b"]),
            node("Mul", ["b", "half"], ["c"]),
            node("Mul", ["c", "scale"], ["d"]),
            node("Reshape", ["d", "shape"], ["e"]),
            node("Conv", ["e", "kernel", "bias"], ["y"]),
        ]

    model = models.model_of(
        nodes(),
        {"x": [2, 3]},
        {"scale": np.array(2, "float32"), "kernel": normal(1, 1, 3), "shape": np.array([2, 1, 4])},
    )
    imported = from_model(model)
    assert sorted(imported.params) == ["bias", "kernel", "scale", "weight"]
    models.check_outputs(imported, model, {"x": normal(2, 3)})
    assert list(from_model(model, trainable=["half"]).params) == ["half"]  # by its exact name


@pytest.mark.parametrize(
    ("name", "is_weight"),
    [
        ("log/add/y", False),
        ("model/truediv;model/log/Log_1", False),
        ("auto.cast.74", False),
        ("logit_scale", True),
        ("block.alpha", True),
        ("body/y_scale", True),
        ("scale/ReadVariableOp;scale", True),
    ],
)
def test_a_scalar_with_a_name_that_exporters_generate_is_no_weight(name, is_weight):
    model = models.model_of(
        [node("Mul", ["x", name], ["a"]), node("Mul", ["a", "w"])],
        {"x": [3]},
        {name: np.array(0.5, "float32"), "w": normal(3)},
    )
    imported = from_model(model)
    assert (name in imported.params) == is_weight
    assert name in from_model(model, trainable=name).params


def test_a_weight_used_twice_is_one_parameter():
    nodes = [
        node("MatMul", ["x", "w"], ["a"]),
        node("Identity", ["w"], ["same"]),
        node("Transpose", ["same"], ["t"], perm=[1, 0]),
        node("MatMul", ["a", "t"]),
    ]
    model = models.model_of(
        nodes, {"x": [2, 4]}, {"w": normal(4, 4, dtype="float64")}, dtype="float64"
    )
    imported = from_model(model)
    assert list(imported.params) == ["w"]
    models.check_parameter_gradients(imported, {"x": normal(2, 4, dtype="float64")})


def test_a_scalar_that_is_also_a_bound_stays_a_constant():
    nodes = [node("Add", ["x", "zero"], ["a"]), node("Clip", ["a", "zero"])]
    model = models.model_of(nodes, {"x": [3]}, {"zero": np.array(0, "float32")})
    imported = from_model(model)
    assert not imported.params
    models.check_outputs(imported, model, {"x": normal(3)})


def test_an_exponent_is_a_parameter_only_by_its_name():
    nodes = [node("Pow", ["x", "exponent"], ["a"]), node("Mul", ["a", "w"])]
    weights = {"exponent": np.array(2, "float32"), "w": normal(3)}
    model = models.model_of(nodes, {"x": [3]}, weights)
    assert list(from_model(model).params) == ["w"]
    assert list(from_model(model, trainable=["exponent"]).params) == ["exponent"]
    models.check_outputs(from_model(model), model, {"x": normal(3)})


def test_initializers_that_are_inputs_too_are_weights():
    model = classifier()
    info = helper.make_tensor_value_info("last", TensorProto.FLOAT, [5, 3])
    model.graph.input.append(info)
    imported = from_model(model)
    assert list(imported.inputs) == ["x"]
    assert "last" in imported.params


# Operators with several results, dropout, unsupported operators


def test_statistics_of_a_layer_normalisation():
    operator = node("LayerNormalization", ["x", "w"], ["y", "mean", "inverse"], axis=1)
    names = ("y", "mean", "inverse")
    model = models.model_of([operator], {"x": [2, 3, 4]}, {"w": normal(3, 4)}, outputs=names)
    models.check_outputs(from_model(model), model, {"x": normal(2, 3, 4)})


def dropped(training):
    nodes = [node("Dropout", ["x", "ratio", "training"], ["a"]), node("Mul", ["a", "w"])]
    weights = {"ratio": np.array(0.3, "float32"), "training": np.array(training), "w": normal(3)}
    return models.model_of(nodes, {"x": [2, 3]}, weights)


def test_dropout_in_inference():
    x = {"x": normal(2, 3)}
    inference = dropped(False)
    imported = from_model(inference)
    assert not imported.draws
    models.check_outputs(imported, inference, x)
    imported = from_model(dropped(True), dropout=False)
    assert [param.name for param in imported.module["main"].params] == ["x", "w"]
    (result,) = models.outputs(imported, x)
    np.testing.assert_allclose(result, x["x"] * imported.params["w"].numpy(), rtol=1e-6)


def test_dropout_in_training_takes_a_seed():
    """Nodes, seeds and positions have masks of their own. The gradient has the mask of the loss."""
    nodes = [
        node("Dropout", ["x", "ratio", "training"], ["a", "mask"], seed=7),
        node("Dropout", ["x", "ratio", "training"], ["b"], seed=7),
        node("Add", ["a", "b"], ["c"]),
        node("Mul", ["c", "w"], ["y"]),
    ]
    weights = {"ratio": np.array(0.25, "float32"), "training": np.array(True)}
    weights["w"] = np.ones((1, 2500), "float32")
    model = models.model_of(nodes, {"x": ["batch", 2500]}, weights, outputs=("y", "mask"))
    model.graph.output[1].type.tensor_type.elem_type = TensorProto.BOOL
    imported = from_model(model)
    assert imported.draws
    assert list(imported.inputs) == ["x"]
    main = imported.module["main"]
    assert [param.name for param in main.params] == ["seed", "x", "w"]
    assert main.attrs["num_input"] == 2
    module = imported.with_loss(lambda bb, y, mask: bb.emit(relax.op.sum(y)))
    assert [param.name for param in module["loss"].params] == ["seed", "x", "w"]
    module = relax_grad.value_and_grad(module, "loss", wrt=["w"])
    run = models.compiled(module, None, "relax_grad")
    x = np.ones((4, 2500), "float32")
    both = []
    for seed in (0, 0, 1):
        y, mask = run("main", np.array(seed), x, weights["w"])
        assert abs(y.mean() - 2) < 0.05
        assert abs(mask.mean() - 0.75) < 0.03
        first, other = mask, (y - mask / np.float32(0.75)) > 0
        assert abs((first == other).mean() - 0.625) < 0.03
        loss, (gradient,) = run("loss_adjoint", np.array(seed), x, weights["w"])
        np.testing.assert_allclose(gradient[0], y.sum(0), rtol=1e-5)
        np.testing.assert_allclose(loss, y.sum(), rtol=1e-5)
        both.append(mask)
    assert (both[0] == both[1]).all()
    assert abs((both[0] == both[2]).mean() - 0.625) < 0.03


def test_the_seed_has_a_name_of_its_own():
    model = dropped(True)
    for proto in (model.graph.input[0], model.graph.node[0]):
        if proto is model.graph.node[0]:
            proto.input[0] = "seed"
        else:
            proto.name = "seed"
    imported = from_model(model)
    assert [param.name for param in imported.module["main"].params] == ["seed_", "seed", "w"]


def test_dropout_of_a_ratio_that_drops_everything_is_refused():
    model = dropped(True)
    ratio = next(tensor for tensor in model.graph.initializer if tensor.name == "ratio")
    ratio.CopyFrom(numpy_helper.from_array(np.array(1.0, "float32"), "ratio"))
    with pytest.raises(UnsupportedOperatorError, match=r"Dropout 'a': its ratio .* 1"):
        from_model(model)


def test_all_unsupported_operators_are_listed():
    nodes = [
        node("Multinomial", ["x"], ["a"], name="first"),
        node("Multinomial", ["x"], ["b"]),
        helper.make_node("Clip", ["a", "b"], ["c"], name="other", domain="com.example"),
        node("Relu", ["c"]),
    ]
    model = models.model_of(nodes, {"x": [1, 8]}, {})
    model.opset_import.append(helper.make_opsetid("com.example", 1))
    with pytest.raises(UnsupportedOperatorError) as error:
        from_model(model)
    assert "Multinomial: 2 (first, b): it draws classes" in str(error.value)
    assert "com.example.Clip: 1 (other)" in str(error.value)


def test_a_function_of_the_model_is_inlined():
    twice = helper.make_function(
        "com.example",
        "Twice",
        ["a"],
        ["b"],
        [node("Add", ["a", "a"], ["b"])],
        [helper.make_opsetid("", 18)],
    )
    nodes = [helper.make_node("Twice", ["x"], ["z"], domain="com.example"), node("Mul", ["z", "w"])]
    model = models.model_of(nodes, {"x": [3]}, {"w": normal(3)})
    model.functions.append(twice)
    model.opset_import.append(helper.make_opsetid("com.example", 1))
    models.check_outputs(from_model(model), model, {"x": normal(3)})


# The packages


def test_onnx_is_imported_late():
    program = "import sys, relax_grad, relax_grad.frontend.onnx; sys.exit('onnx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize(("package", "arguments"), [("onnx", {}), ("onnxsim", {"simplify": True})])
def test_a_missing_package_is_named(package, arguments, monkeypatch):
    find = _packages.is_installed
    monkeypatch.setattr(_packages, "is_installed", lambda name: name != package and find(name))
    with pytest.raises(ImportError, match=f"pip install '{package}>="):
        from_model(classifier(), **arguments)
