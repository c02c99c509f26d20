"""Training of imported ONNX models: the states of normalisations, and losses."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tvm import relax

import relax_grad

onnx = pytest.importorskip("onnx", reason="the package onnx is not installed: extra onnx")

import onnx_models as models  # noqa: E402
from onnx import TensorProto, helper  # noqa: E402
from onnx_models import WEIGHTS, classifier, node, normal  # noqa: E402

from relax_grad.frontend.onnx import from_model  # noqa: E402
from relax_grad.training import SGD, Trainer, train_step  # noqa: E402


def normalization(training, momentum=0.7, dtype="float64"):
    attributes = {"training_mode": 1} if training else {}
    nodes = [
        node(
            "BatchNormalization",
            ["x", "g", "b", "mean", "var"],
            ["a", "new", ""][: 1 + training],
            momentum=momentum,
            epsilon=0.01,
            **attributes,
        ),
        node("Mul", ["a", "w"]),
    ]
    weights = {
        "g": normal(3),
        "b": normal(3),
        "mean": normal(3),
        "var": 1 + normal(3) ** 2,
        "w": normal(1),
    }
    weights = {name: value.astype(dtype) for name, value in weights.items()}
    return models.model_of(nodes, {"x": [4, 3, 5]}, weights, dtype=dtype)


def test_training_normalisation_returns_its_states():
    model, x = normalization(True), normal(4, 3, 5, dtype="float64")
    imported = from_model(model)
    assert list(imported.states) == ["mean", "var"]
    assert list(imported.outputs) == ["y"]
    results = models.outputs(imported, {"x": x})
    model.graph.node[0].output[:] = ["a", "new_mean", "new_var"]
    for name in ("new_mean", "new_var"):
        model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.DOUBLE, [3]))
    for result, expected in zip(results, models.wanted(model, {"x": x}), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-6)
    old, mean = imported.states["mean"].numpy(), x.mean((0, 2))
    np.testing.assert_allclose(results[1], 0.7 * old + 0.3 * mean, rtol=1e-6)
    models.check_parameter_gradients(imported, {"x": x})


def test_states_of_the_old_form_of_training():
    model, x = normalization(False, dtype="float32"), normal(4, 3, 5)
    model.graph.node[0].output.extend(["m", "v", "saved_m", "saved_v"])
    model.opset_import[0].version = 9
    imported = from_model(model)
    assert list(imported.states) == ["mean", "var"]
    _, new_mean, _ = models.outputs(imported, {"x": x})
    expected = 0.7 * imported.states["mean"].numpy() + 0.3 * x.mean((0, 2))
    np.testing.assert_allclose(new_mean, expected, rtol=1e-5)


def test_a_state_of_two_normalisations_is_refused():
    model = normalization(True)
    second = node("BatchNormalization", ["y", "g", "b", "mean", "var"], ["z"], training_mode=1)
    model.graph.node.append(second)
    model.graph.output[0].name = "z"
    with pytest.raises(ValueError, match="two normalisations update the running statistic mean"):
        from_model(model)


def mean_square(bb, y, target):
    error = bb.emit(relax.op.subtract(y, target))
    return bb.emit(relax.op.mean(relax.op.multiply(error, error)))


def test_a_loss_with_targets():
    imported = from_model(classifier(batch="batch"))
    module = imported.with_loss(mean_square, {"target": (("batch", 3), "float32")})
    loss = module["loss"]
    assert [param.name for param in loss.params] == ["x", "target", *WEIGHTS, "mean", "var"]
    assert int(loss.attrs["num_input"]) == 2
    module = relax_grad.value_and_grad(module, "loss", wrt=list(imported.params))
    run = models.compiled(module, "loss_adjoint")
    x, target = normal(2, 3, 7, 7), normal(2, 3)
    values = {name: value.numpy() for name, value in imported.params.items()}
    rest = list(imported.frozen.values())
    losses = []
    for _ in range(5):
        loss, gradients = run(x, target, *values.values(), *rest)
        losses.append(float(loss))
        for (name, value), gradient in zip(values.items(), gradients, strict=True):
            values[name] = value - 0.02 * gradient
    assert losses[-1] < losses[0]


def test_a_loss_of_a_model_with_states():
    imported = from_model(normalization(True))
    module = imported.with_loss(models.weighted_sum)
    x = normal(4, 3, 5, dtype="float64")
    loss, mean, var = models.compiled(module, "loss")(x, *imported.values)
    assert loss.shape == ()
    np.testing.assert_allclose(mean, models.outputs(imported, {"x": x})[1])
    assert var.shape == (3,)


def test_a_wrong_loss_is_refused():
    imported = from_model(classifier())
    with pytest.raises(ValueError, match="the model has a parameter 'gamma' already"):
        imported.with_loss(mean_square, {"gamma": ((2, 3), "float32")})
    with pytest.raises(
        ValueError, match="has the extent 'n', but the symbols of the model are none"
    ):
        imported.with_loss(mean_square, {"target": (("n", 3), "float32")})
    with pytest.raises(TypeError, match="loss_fn must return a Relax expression"):
        imported.with_loss(lambda bb, y: None)


def in_training_mode():
    """Return a model with batch normalisation and dropout in training mode, which returns the new
    mean too."""
    nodes = [
        node("MatMul", ["x", "w"], ["h"]),
        node(
            "BatchNormalization",
            ["h", "g", "b", "mean", "var"],
            ["n", "mean2", "var2"],
            training_mode=1,
        ),
        node("Dropout", ["n", "ratio", "on"]),
    ]
    weights = {
        "w": normal(8, 3),
        "g": np.ones(3, "float32"),
        "b": normal(3),
        "mean": np.zeros(3, "float32"),
        "var": np.ones(3, "float32"),
        "ratio": np.array(0.5, "float32"),
        "on": np.array(True),
    }
    return models.model_of(nodes, {"x": ["n", 8]}, weights, outputs=("y", "mean2"))


def square(bb, y, *more):
    return bb.emit(relax.op.mean(relax.op.multiply(y, y)))


@pytest.fixture(scope="module")
def trainer():
    imported = from_model(in_training_mode())
    made = Trainer(train_step(imported, SGD(lr=0.1), loss=square, outputs=True))
    made.first = imported.params["w"].numpy()
    rng = np.random.default_rng(2)
    made.batches = [rng.normal(size=(16, 8)).astype("float32") for _ in range(3)]
    made.results = [made.step(x) for x in made.batches]
    return made


def in_inference(trainer, x):
    values = {name: value.numpy().astype("float64") for name, value in trainer.values.items()}
    normal = (x @ values["w"] - values["mean"]) / np.sqrt(values["var"] + 1e-5)
    return normal * values["g"] + values["b"], values["mean"]


def test_prediction_of_a_model_in_training_mode_is_inference(trainer):
    x = trainer.batches[0]
    wanted, mean = in_inference(trainer, x)
    y, new_mean = trainer.predict(x)
    np.testing.assert_allclose(y.numpy(), wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(new_mean.numpy(), mean, rtol=1e-6)
    assert np.abs(mean).max() > 0.01


def test_evaluation_of_a_model_in_training_mode_is_inference(trainer):
    wanted = [in_inference(trainer, x)[0] for x in trainer.batches]
    metrics = trainer.evaluate(trainer.batches, {"largest": lambda y, mean: np.abs(y).max()})
    np.testing.assert_allclose(
        metrics["largest"], np.mean([np.abs(y).max() for y in wanted]), rtol=1e-4
    )
    metrics = trainer.evaluate(trainer.batches)
    np.testing.assert_allclose(metrics["loss"], np.mean(np.square(wanted)), rtol=1e-4)


def test_a_step_returns_the_outputs_of_the_model(trainer):
    assert trainer.train_step.outputs == ("y", "mean2")
    result = trainer.results[0]
    y = result.outputs["y"].numpy()
    np.testing.assert_allclose(result.loss, np.square(y).mean(), rtol=1e-5)
    assert 0.3 < (y == 0).mean() < 0.7
    mean = 0.1 * (trainer.batches[0] @ trainer.first).mean(0)
    np.testing.assert_allclose(result.outputs["mean2"].numpy(), mean, rtol=1e-3, atol=1e-5)


def test_an_exported_step_predicts_in_inference(trainer, tmp_path):
    trainer.train_step.export(tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["forward"]["name"] == "inference"
    assert [entry["name"] for entry in manifest["forward"]["inputs"]] == ["x"]


def test_a_model_in_inference_has_one_function():
    names = [variable.name_hint for variable in from_model(classifier()).module.get_global_vars()]
    assert "inference" not in names


def test_a_conditional_of_the_model_and_one_of_the_loss_train():
    """Both branches have a weight; each step changes that of the branch that it takes."""

    def branch(name, kind):
        inner = [node("MatMul", ["x", name], ["m"]), node(kind, ["m"], ["z"])]
        output = helper.make_tensor_value_info("z", TensorProto.FLOAT, [2, 3])
        return helper.make_graph(inner, name, [], [output])

    weights = {"one": normal(4, 3), "two": normal(4, 3)}
    conditional = node(
        "If", ["flag"], then_branch=branch("one", "Tanh"), else_branch=branch("two", "Identity")
    )
    model = models.model_of([conditional], {"x": [2, 4]}, weights)
    model.graph.input.append(helper.make_tensor_value_info("flag", TensorProto.BOOL, []))

    def loss(bb, y, flag):
        whole = bb.emit(relax.op.sum(relax.op.multiply(y, y)))
        half = relax.op.multiply(whole, relax.const(0.5, "float32"))
        return bb.emit(relax.If(flag, relax.SeqExpr([], half), relax.SeqExpr([], whole)))

    step = train_step(
        from_model(model), SGD(lr=0.1), loss=loss, targets={"halved": ((), "bool")}, outputs=True
    )
    trainer, x, values = Trainer(step), normal(2, 4), dict(weights)
    for flag in (True, False, True):
        halved = not flag
        name = "one" if flag else "two"
        y = np.tanh(x @ values[name]) if flag else x @ values[name]
        factor = 0.5 if halved else 1.0
        change = 2 * factor * y * (1 - y**2 if flag else 1)
        result = trainer.step(x, np.array(flag), np.array(halved))
        np.testing.assert_allclose(result.loss, factor * np.square(y).sum(), rtol=1e-5)
        np.testing.assert_allclose(result.outputs["y"].numpy(), y, rtol=1e-5, atol=1e-6)
        values[name] = values[name] - 0.1 * x.T @ change
        for param, value in values.items():
            np.testing.assert_allclose(trainer.params[param].numpy(), value, rtol=1e-4, atol=1e-5)
        predicted = trainer.predict(x, np.array(flag)).numpy()
        wanted = np.tanh(x @ values[name]) if flag else x @ values[name]
        np.testing.assert_allclose(predicted, wanted, rtol=1e-4, atol=1e-5)


def test_a_loss_in_the_graph_trains():
    nodes = [
        node("MatMul", ["x", "w"], ["scores"]),
        node("SoftmaxCrossEntropyLoss", ["scores", "labels"], ["cost", "likelihoods"]),
    ]
    model = models.model_of(
        nodes, {"x": ["n", 4]}, {"w": normal(4, 3)}, outputs=("cost", "scores"), opset=13
    )
    labels = helper.make_tensor_value_info("labels", TensorProto.INT64, ["n"])
    model.graph.input.append(labels)
    imported = from_model(model)
    trainer = Trainer(train_step(imported, SGD(lr=0.5), loss=lambda bb, cost, scores: cost))
    x, labels, w = normal(6, 4), np.arange(6) % 3, imported.params["w"].numpy()
    for _ in range(2):
        shares = np.exp(x @ w)
        shares /= shares.sum(1, keepdims=True)
        result = trainer.step(x, labels)
        np.testing.assert_allclose(result.loss, -np.log(shares[range(6), labels]).mean(), rtol=1e-5)
        w = w - 0.5 * x.T @ (shares - np.eye(3)[labels]) / 6
        np.testing.assert_allclose(trainer.params["w"].numpy(), w, rtol=1e-4, atol=1e-6)


def test_an_output_without_known_extents_is_named():
    """The end of a slice is an input."""
    nodes = [node("Slice", ["x", "zero", "end", "zero"], ["p"]), node("MatMul", ["p", "w"])]
    model = models.model_of(nodes, {"x": ["t", 4]}, {"zero": np.array([0]), "w": normal(4, 3)})
    end = onnx.helper.make_tensor_value_info("end", onnx.TensorProto.INT64, [1])
    model.graph.input.append(end)
    with pytest.raises(ValueError, match=r"reads the output y, .*: from_model\(..., shapes="):
        train_step(from_model(model), SGD(), loss=square)


def test_the_extent_of_half_a_symbolic_axis_is_known():
    nodes = [
        node("Shape", ["x"], ["s"]),
        node("Gather", ["s", "one"], ["t"]),
        node("Div", ["t", "two"], ["half"]),
        node("Slice", ["x", "zero", "half", "one"], ["p"]),
        node("MatMul", ["p", "w"]),
    ]
    integers = {"zero": np.array([0]), "one": np.array([1]), "two": np.array([2])}
    model = models.model_of(nodes, {"x": ["b", "t", 4]}, {**integers, "w": normal(4, 3)})
    assert str(from_model(model).outputs["y"].shape) == "R.shape([b, t // 2, 3])"
    known = from_model(model, shapes={"x": ("b", 7, 4)})
    assert str(known.outputs["y"].shape) == "R.shape([b, 3, 3])"
    assert train_step(known, SGD(), loss=square).outputs == ()


def test_negative_places_of_a_table_count_from_the_end():
    """The trainer knows the range of the places."""
    model = models.model_of([node("Gather", ["w", "ids"])], {}, {"w": normal(9, 4)})
    ids = onnx.helper.make_tensor_value_info("ids", onnx.TensorProto.INT64, ["n"])
    model.graph.input.append(ids)
    imported = from_model(model)
    w = imported.params["w"].numpy()
    trainer = Trainer(train_step(imported, SGD(lr=0.5), loss=square))
    places = np.array([0, 8, -1, -9])
    np.testing.assert_allclose(trainer.predict(places).numpy(), w[places])
    assert np.isfinite(trainer.step(places).loss)
    for wrong in (9, -10):
        with pytest.raises(IndexError, match=rf"ids\[1\] is {wrong}, .* from -9 to 8"):
            trainer.step(np.array([0, wrong]))
