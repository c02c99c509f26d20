"""Files of ONNX models with trained values: the places of weights, external data, inference, and
errors."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

onnx = pytest.importorskip("onnx", reason="the package onnx is not installed: extra onnx")

import onnx_models as models  # noqa: E402
from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from onnx_models import node, normal  # noqa: E402

from relax_grad.frontend.onnx import from_model  # noqa: E402
from relax_grad.training import SGD, Trainer, lora, train_step  # noqa: E402


def run(path, feeds):
    """Check a file, and return its outputs by onnxruntime, or by ONNX's evaluator where it is not
    installed."""
    onnx.checker.check_model(str(path), full_check=True)
    try:
        import onnxruntime
    except ImportError:
        return models.wanted(onnx.load(path), feeds)
    return onnxruntime.InferenceSession(str(path)).run(None, feeds)


def constant(name, **value):
    return helper.make_node("Constant", [], [name], **value)


def branch(kind):
    """Return a branch with a weight in a Constant node, whose name both branches use."""
    inner = [
        constant("inner", value=numpy_helper.from_array(normal(6, 6))),
        node("MatMul", ["d", "inner"], ["m"]),
        node(kind, ["m"], ["z"]),
    ]
    output = helper.make_tensor_value_info("z", TensorProto.FLOAT, ["n", 6])
    return helper.make_graph(inner, kind, [], [output])


@pytest.fixture(scope="module")
def everywhere():
    """A model with weights in all places, in training mode."""
    nodes = [
        constant("in node", value=numpy_helper.from_array(normal(4, 6))),
        constant("bias", value_floats=[0.1, 0.2, 0.3, 0.4, 0.5, 0.6]),
        node("MatMul", ["x", "in node"], ["h"]),
        node("Add", ["h", "bias"], ["i"]),
        node("BatchNormalization", ["i", "g", "b", "mean", "var"], ["n", "m2", "v2"],
            training_mode=1),
        node("Dropout", ["n", "ratio", "on"], ["d"]),
        node("If", ["flag"], ["e"], then_branch=branch("Tanh"), else_branch=branch("Relu")),
        node("MatMul", ["e", "shared"], ["f"]),
        node("Transpose", ["shared"], ["turned"], perm=[1, 0]),
        node("MatMul", ["f", "turned"]),
    ]  # fmt: skip
    weights = {
        "g": np.ones(6, "float32"),
        "b": normal(6),
        "mean": np.zeros(6, "float32"),
        "var": np.ones(6, "float32"),
        "ratio": np.array(0.25, "float32"),
        "on": np.array(True),
        "shared": normal(6, 3),
    }
    model = models.model_of(nodes, {"x": ["n", 4]}, weights)
    model.graph.input.append(helper.make_tensor_value_info("flag", TensorProto.BOOL, []))
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 6]))
    model.graph.doc_string = "kept"
    return model


def loss(bb, y):
    return bb.emit(relax.op.mean(relax.op.multiply(y, y)))


X = np.random.default_rng(3).normal(size=(5, 4)).astype("float32")


@pytest.fixture(scope="module")
def trained(everywhere):
    imported = from_model(everywhere)
    trainer = Trainer(train_step(imported, SGD(lr=0.02), loss=loss, ema=0.5))
    for i in range(4):
        trainer.step(X, np.array(i % 2 == 0))
    return imported, trainer


@pytest.mark.parametrize("ema", [False, True])
def test_a_file_has_the_outputs_of_the_trainer(everywhere, trained, tmp_path, ema):
    imported, trainer = trained
    assert list(imported.params) == ["g", "b", "shared", "in node", "bias", "inner", "inner_"]
    before = everywhere.SerializeToString(deterministic=True)
    path = tmp_path / "trained.onnx"
    imported.write_to(path, trainer, ema=ema, inference=True)
    for flag in (True, False):
        (result,) = run(path, {"x": X, "flag": np.array(flag)})
        wanted = trainer.predict(X, np.array(flag), ema=ema).numpy()
        np.testing.assert_allclose(result, wanted, rtol=1e-4, atol=1e-5)
    assert everywhere.SerializeToString(deterministic=True) == before
    assert [file.name for file in tmp_path.iterdir()] == ["trained.onnx"]
    again = from_model(path)
    assert "on" not in {tensor.name for tensor in onnx.load(path).graph.initializer}
    assert not again.draws
    assert not again.states


def test_all_else_stays_as_it_is(everywhere, trained, tmp_path):
    """Also the mode of training, unless inference is asked for; values that are not given stay
    too."""
    imported, trainer = trained
    path = tmp_path / "trained.onnx"
    imported.write_to(str(path), {"shared": trainer.params["shared"]})
    written = onnx.load(path)
    (place,) = [i for i, tensor in enumerate(written.graph.initializer) if tensor.name == "shared"]
    value = numpy_helper.to_array(written.graph.initializer[place])
    np.testing.assert_array_equal(value, trainer.params["shared"].numpy())
    written.graph.initializer[place].CopyFrom(everywhere.graph.initializer[place])
    assert written == everywhere
    imported.write_to(path, imported.params)
    for name, param in from_model(path).params.items():
        np.testing.assert_array_equal(param.numpy(), imported.params[name].numpy())


def test_external_data(tmp_path):
    """Tensors that are not trained are copied; the file may take the place of the old one."""
    weights = {
        "table": normal(300, 100),
        "w": normal(100, 200),
        "v": normal(200, 3),
        "c": normal(3),
    }
    nodes = [
        node("Gather", ["table", "ids"], ["e"]),
        node("MatMul", ["e", "w"], ["h"]),
        node("MatMul", ["h", "v"], ["k"]),
        node("Add", ["k", "c"]),
    ]
    model = models.model_of(nodes, {}, weights)
    model.graph.input.append(helper.make_tensor_value_info("ids", TensorProto.INT64, ["n"]))
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3]))
    path = tmp_path / "large.onnx"
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=16)
    imported = from_model(path, trainable=["w", "c"])
    for name, value in weights.items():
        param = {**imported.params, **imported.frozen}[name]
        np.testing.assert_array_equal(param.numpy(), value)
    values = {"w": normal(100, 200), "c": normal(3)}
    ids = np.array([0, 299, 7])
    wanted = weights["table"][ids] @ values["w"] @ weights["v"] + values["c"]
    (tmp_path / "other").mkdir()
    for target in (tmp_path / "other" / "new.onnx", path):
        imported.write_to(target, values)
        (result,) = run(target, {"ids": ids})
        np.testing.assert_allclose(result, wanted, rtol=1e-3, atol=1e-3)
    assert (tmp_path / "other" / "new.onnx").stat().st_size < 2000
    assert (tmp_path / "other" / "new.onnx.data").stat().st_size < 4 * 52000
    with pytest.raises(
        ValueError, match=r"tensor table are not loaded: .* in the file 'large.onnx.data'"
    ):
        from_model(onnx.load(tmp_path / "large.onnx", load_external_data=False))
    (tmp_path / "large.onnx.data").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"tensor table are external data in the file .*large"
    ):
        from_model(path)


def test_a_model_that_is_too_large_for_one_file(tmp_path, monkeypatch):
    """It gets a second file, as no message of protobuf has more than 2 GB."""
    monkeypatch.setattr("relax_grad.frontend.onnx._write.MOST_BYTES", 100_000)
    w, v = normal(200, 200), normal(200, 3)
    nodes = [node("MatMul", ["x", "w"], ["h"]), node("MatMul", ["h", "v"])]
    model = models.model_of(nodes, {"x": [2, 200]}, {"w": w, "v": v})
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 3]))
    path, x = tmp_path / "model.onnx", normal(2, 200)
    from_model(model).write_to(path, {"v": 2 * v})
    assert (tmp_path / "model.onnx.data").stat().st_size >= w.nbytes + v.nbytes
    np.testing.assert_allclose(run(path, {"x": x})[0], x @ w @ (2 * v), rtol=1e-3, atol=1e-3)


def test_external_data_that_does_not_fit_is_refused(tmp_path):
    model = models.model_of([node("MatMul", ["x", "w"])], {"x": [2, 200]}, {"w": normal(200, 200)})
    path = tmp_path / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location="w.bin")
    data = tmp_path / "w.bin"
    data.write_bytes(data.read_bytes()[:-4])
    with pytest.raises(
        ValueError, match=r"tensor w has the bytes 0 to 160000 of .*w.bin, which has 159996"
    ):
        from_model(path)
    outside = onnx.load(path, load_external_data=False)
    outside.graph.initializer[0].external_data[0].value = "../w.bin"
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "model.onnx").write_bytes(outside.SerializeToString())
    with pytest.raises(ValueError, match=r"in '../w.bin', outside of the folder"):
        from_model(tmp_path / "folder" / "model.onnx")


def test_weights_in_a_function_of_the_model(tmp_path):
    body = [
        constant("k", value=numpy_helper.from_array(normal(3, 3))),
        node("MatMul", ["a", "k"], ["z"]),
    ]
    opsets = [helper.make_opsetid("", 18)]
    layer = helper.make_function("com.example", "Layer", ["a"], ["z"], body, opsets)
    nodes = [
        helper.make_node("Layer", ["x"], ["h"], domain="com.example"),
        helper.make_node("Layer", ["h"], ["i"], domain="com.example"),
        node("MatMul", ["i", "w"]),
    ]
    model = models.model_of(nodes, {"x": [2, 3]}, {"w": normal(3, 3)})
    model.functions.append(layer)
    model.opset_import.append(helper.make_opsetid("com.example", 1))
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 3]))
    imported = from_model(model)
    assert len(imported.params) == 3
    values = {name: normal(3, 3) for name in imported.params}
    path, x = tmp_path / "model.onnx", normal(2, 3)
    imported.write_to(path, values)
    first, second = (values[name] for name in imported.params if name != "w")
    wanted = x @ first @ second @ values["w"]
    np.testing.assert_allclose(run(path, {"x": x})[0], wanted, rtol=1e-4, atol=1e-5)
    imported.write_to(path, {"w": values["w"]})
    assert len(onnx.load(path).functions) == 1  # which no other value concerns


def test_merged_adapters_are_written(tmp_path):
    model = models.model_of([node("MatMul", ["x", "w"])], {"x": [2, 4]}, {"w": normal(4, 3)})
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 3]))
    imported = from_model(model)
    adapted = lora(imported, rank=1, targets="w")
    values = {name: normal(*map(int, param.shape)) for name, param in adapted.params.items()}
    imported.write_to(tmp_path / "merged.onnx", adapted.merged(values))
    x = normal(2, 4)
    wanted = x @ adapted.merged(values)["w"].numpy()
    np.testing.assert_allclose(run(tmp_path / "merged.onnx", {"x": x})[0], wanted, rtol=1e-5)
    with pytest.raises(ValueError, match=r"no tensor 'w.lora_A'; .*lora.merged\(trainer.params\)"):
        imported.write_to(tmp_path / "merged.onnx", values)


@pytest.mark.parametrize("opset", [9, 13])
def test_inference_of_older_versions(opset, tmp_path):
    # ONNX's evaluator normalises these versions by the batch.
    pytest.importorskip("onnxruntime", reason="onnxruntime, the reference, is not installed")
    results = ["y", "m2", "v2", "sm", "sv"][: 5 if opset < 14 else 3]
    nodes = [node("BatchNormalization", ["x", "g", "b", "mean", "var"], results)]
    weights = {name: np.abs(normal(3)) for name in ("g", "b", "mean", "var")}
    outputs = ("y", "m2")
    model = models.model_of(nodes, {"x": [2, 3]}, weights, outputs, opset=opset)
    for output, shape in zip(model.graph.output, ([2, 3], [3]), strict=True):
        output.CopyFrom(helper.make_tensor_value_info(output.name, TensorProto.FLOAT, shape))
    path, x = tmp_path / "model.onnx", normal(2, 3)
    from_model(model).write_to(path, {"mean": weights["mean"] + 1}, inference=True)
    y, mean = run(path, {"x": x})
    np.testing.assert_allclose(mean, weights["mean"] + 1)
    wanted = (x - mean) / np.sqrt(weights["var"] + 1e-5) * weights["g"] + weights["b"]
    np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-5)


def test_a_model_that_has_changed_is_refused(tmp_path):
    model = models.model_of([node("MatMul", ["x", "w"])], {"x": [2, 4]}, {"w": normal(4, 3)})
    imported = from_model(model)
    values = {"w": normal(4, 3)}
    path = tmp_path / "model.onnx"
    model.graph.initializer[0].dims[:] = [3, 4]
    with pytest.raises(ValueError, match=r"has changed: w has the shape \(3, 4\) there"):
        imported.write_to(path, values)
    model.graph.initializer[0].name = "other"
    with pytest.raises(ValueError, match="has changed: it has no tensor w any more"):
        imported.write_to(path, values)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("values", "more", "error", "message"),
    [
        ({"v": np.ones(3)}, {}, ValueError, "values: the import has no tensor 'v'; it has w"),
        ({"w": np.ones(3)}, {}, ValueError, r"w must have the shape \(4, 3\), but it has \(3,\)"),
        ({"w": 3}, {}, TypeError, "values: w must be an array or a tensor, but it is 3"),
        ({}, {"ema": True}, ValueError, "ema=True needs a Trainer as values"),
        ({}, {"ema": {"lr": 1}}, ValueError, "ema: there are no moving averages"),
        ({}, {"ema": "yes"}, TypeError, "ema must be True, False or a mapping"),
        ({}, {"inference": 1}, TypeError, "inference must be True or False, but it is 1"),
        ({}, {"path": 3}, TypeError, "path must be a path, but it is 3"),
        (3, {}, TypeError, "values must be a Trainer or a mapping .* but it is int"),
    ],
)
def test_values_that_do_not_fit_are_refused(values, more, error, message, tmp_path):
    model = models.model_of([node("MatMul", ["x", "w"])], {"x": [2, 4]}, {"w": normal(4, 3)})
    with pytest.raises(error, match=message):
        from_model(model).write_to(values=values, **{"path": tmp_path / "model.onnx", **more})
