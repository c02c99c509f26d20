"""Low-rank adapters: as those of the library peft, merged weights, files, and targets that cannot
have one."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op

from relax_grad.training import SGD, AdamW, Trainer, lora, train_step

LINEAR = ["query.weight", "out.weight"]


def arrays(tensors):
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def tensors(values):
    return {name: tvm.runtime.tensor(np.ascontiguousarray(value)) for name, value in values.items()}


def close(actual, wanted, tolerance=1e-5):
    assert set(actual) == set(wanted)
    for name, value in wanted.items():
        np.testing.assert_allclose(actual[name], value, tolerance, tolerance, err_msg=name)


def perceptron():
    """Return ``loss(x, w, b, v)`` of two layers as a module, and its weights."""
    rng = np.random.default_rng(0)
    shapes = {"w": (6, 5), "b": (5,), "v": (3, 5)}
    x = relax.Var("x", relax.TensorType((4, 6), "float64"))
    w, b, v = (relax.Var(name, relax.TensorType(s, "float64")) for name, s in shapes.items())
    bb = relax.BlockBuilder()
    with bb.function("loss", [x, w, b, v]):
        with bb.dataflow():
            hidden = bb.emit(op.tanh(bb.emit(op.add(bb.emit(op.matmul(x, w)), b))))
            out = bb.emit(op.matmul(hidden, bb.emit(op.permute_dims(v))))
            loss = bb.emit_output(op.sum(op.multiply(out, out)))
        bb.emit_func_output(loss)
    return bb.get(), {name: rng.normal(size=shape) for name, shape in shapes.items()}


def test_gradients_of_the_adapters_of_a_module():
    """One step of SGD against NumPy: w is a weight of shape (inputs, outputs), v one of shape
    (outputs, inputs)."""
    module, values = perceptron()
    adapted = lora(module, 2, ["w", "v"], alpha=3.0, values=values)
    rng = np.random.default_rng(1)
    start = {name: rng.normal(size=tuple(param.shape)) for name, param in adapted.params.items()}
    x = rng.normal(size=(4, 6))
    trainer = Trainer(train_step(adapted, SGD(0.01)), values=start)
    result = trainer.step(x)

    def forward(p):
        w = values["w"] + 1.5 * (p["w.lora_B"] @ p["w.lora_A"]).T
        v = values["v"] + 1.5 * p["v.lora_B"] @ p["v.lora_A"]
        return float(np.sum((np.tanh(x @ w + values["b"]) @ v.T) ** 2))

    np.testing.assert_allclose(result.loss, forward(start))
    for name, value in start.items():
        slope = (value - trainer.params[name].numpy()) / 0.01
        direction = rng.normal(size=value.shape)
        ahead, back = (forward({**start, name: value + step * direction}) for step in (1e-6, -1e-6))
        np.testing.assert_allclose(np.sum(slope * direction), (ahead - back) / 2e-6, rtol=1e-5)
    assert list(adapted.base) == ["w", "b", "v"]
    merged = arrays(adapted.merged(trainer.params))
    assert set(merged) == set(values)
    np.testing.assert_array_equal(merged["b"], values["b"])


def test_the_first_values_change_nothing():
    module, values = perceptron()
    adapted = lora(module, 2, "*[wv]", values=values)
    for name, value in arrays(adapted.merged()).items():
        np.testing.assert_array_equal(value, values[name])
    x = np.random.default_rng(2).normal(size=(4, 6))
    plain = Trainer(train_step(module, SGD(), wrt=list(values)), values=values).step(x).loss
    np.testing.assert_allclose(Trainer(train_step(adapted, SGD())).step(x).loss, plain, rtol=1e-12)


@pytest.fixture(scope="module")
def network():
    torch = pytest.importorskip("torch", reason="the package torch is not installed: extra torch")
    nn = torch.nn

    class Network(nn.Module):
        """Every kind of layer with an adapter, dropout, and a layer without one."""

        def __init__(self):
            super().__init__()
            self.table, self.query = nn.Embedding(11, 6), nn.Linear(6, 8)
            self.conv, self.norm = nn.Conv1d(8, 6, 3, padding=1, stride=2), nn.LayerNorm(6)
            self.out = nn.Linear(6, 5, bias=False)

        def forward(self, places):
            x = torch.relu(self.query(self.table(places)))
            return self.out(self.norm(self.conv(x.transpose(1, 2)).transpose(1, 2)))

    torch.manual_seed(0)
    return Network().double()


def test_adapters_as_those_of_peft(network, torch, tmp_path):
    from torch_packages import torchvision

    try:
        torchvision()
        import peft
    except ModuleNotFoundError as error:
        pytest.skip(f"a package is not installed: extra zoo ({error})")

    from relax_grad.frontend.torch import from_module

    places, wanted = torch.randint(0, 11, (4, 7)), torch.randint(0, 5, (4, 4))

    def loss(output, target):
        return torch.nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

    imported = from_module(network, (places,), loss=loss, targets=(wanted,))
    targets = ["table.weight", "query.weight", "conv.weight", "out.weight"]
    adapted = lora(imported, 2, targets, alpha=6)
    config = peft.LoraConfig(
        r=2,
        lora_alpha=6,
        target_modules=["table", "query", "conv", "out"],
        init_lora_weights=False,
    )
    model = peft.get_peft_model(copy.deepcopy(network), config).double()
    prefix = "base_model.model."
    theirs = {}
    for name, param in model.named_parameters():
        if param.requires_grad:
            layer, _, rest = name.removeprefix(prefix).partition(".lora_")
            kind = "A" if "A" in rest else "B"
            theirs[f"{layer}.lora_{kind}"] = param
    assert set(theirs) == set(adapted.params)
    start = {name: theirs[name].detach().clone() for name in adapted.params}
    trainer = Trainer(train_step(adapted, SGD(0.1)), values=start)
    optimizer = torch.optim.SGD(theirs.values(), 0.1)
    for _ in range(5):
        optimizer.zero_grad()
        value = loss(model(places), wanted)
        value.backward()
        optimizer.step()
        np.testing.assert_allclose(trainer.step(places, wanted).loss, value.item(), rtol=1e-9)
    trained = {name: param.detach().numpy() for name, param in theirs.items()}
    close(arrays(trainer.params), trained, 1e-9)
    outputs = model.eval()(places).detach().numpy()
    np.testing.assert_allclose(trainer.predict(places).numpy(), outputs, rtol=1e-8, atol=1e-10)


def test_predictions_are_those_of_merged_weights(network, torch, tmp_path):
    from relax_grad.frontend.torch import from_module

    places = torch.randint(0, 11, (4, 7))
    imported = from_module(network, (places,), loss=lambda y: y.square().mean())
    targets = ["table.weight", "query.weight", "conv.weight", "out.weight"]
    adapted = lora(imported, 2, targets, alpha=3)
    rng = np.random.default_rng(4)
    start = {name: rng.normal(size=tuple(param.shape)) for name, param in adapted.params.items()}
    trainer = Trainer(train_step(adapted, SGD(0.1)), values=start)
    trainer.step(places)
    other = copy.deepcopy(network)
    imported.copy_to(other, adapted.merged(trainer.params))
    wanted = other(places).detach().numpy()
    np.testing.assert_allclose(trainer.predict(places).numpy(), wanted, rtol=1e-8, atol=1e-10)
    assert all(np.abs(trainer.params[name].numpy() - start[name]).max() > 1e-6 for name in start)

    path = tmp_path / "adapters"
    adapted.save(path, trainer.params)
    assert path.stat().st_size < 2048 + 8 * sum(array.size for array in start.values())
    loaded = adapted.load(path)
    close(arrays(loaded.params), arrays(trainer.params), 0)
    again = Trainer(train_step(loaded, SGD(0.1)))
    assert again.step(places).loss == trainer.step(places).loss


def test_a_trainer_saves_and_resumes(network, torch, tmp_path):
    from relax_grad.frontend.torch import from_module

    places = torch.randint(0, 11, (4, 7))
    imported = from_module(network, (places,), loss=lambda y: y.square().mean())
    adapted = lora(imported, 2, LINEAR)
    before = arrays(adapted.base)
    trainer = Trainer(train_step(adapted, AdamW(0.05), ema=0.9))
    losses = [trainer.step(places).loss for _ in range(8)]
    assert losses[-1] < losses[0]
    close(arrays(trainer.frozen), before, 0)
    trainer.save(tmp_path / "state")
    other = Trainer(train_step(adapted, AdamW(0.05), ema=0.9))
    other.load(tmp_path / "state")
    assert other.step(places).loss == trainer.step(places).loss


def test_an_onnx_model():
    onnx = pytest.importorskip("onnx", reason="the package onnx is not installed: extra onnx")
    from relax_grad.frontend.onnx import from_model

    rng = np.random.default_rng(0)
    weights = {"fc.weight": rng.normal(size=(5, 3)), "last": rng.normal(size=(5, 2))}
    helper = onnx.helper
    graph = helper.make_graph(
        [
            helper.make_node("Gemm", ["x", "fc.weight"], ["h"], transB=1),
            helper.make_node("Tanh", ["h"], ["t"]),
            helper.make_node("MatMul", ["t", "last"], ["y"]),
        ],
        "graph",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, (4, 3))],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, (4, 2))],
        [
            onnx.numpy_helper.from_array(weight.astype("float32"), name)
            for name, weight in weights.items()
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    adapted = lora(from_model(model), 2, ["fc.weight", "last"])
    assert {adapter.kind for adapter in adapted.adapters} == {"linear", "transposed"}
    step = train_step(adapted, AdamW(0.1), loss=lambda bb, y: op.mean(op.multiply(y, y)))
    trainer = Trainer(step)
    x = rng.normal(size=(4, 3)).astype("float32")
    first = trainer.step(x).loss
    for _ in range(20):
        last = trainer.step(x).loss
    assert last < first / 2
    merged = arrays(adapted.merged(trainer.params))
    wanted = np.tanh(x @ merged["fc.weight"].T) @ merged["last"]
    np.testing.assert_allclose(trainer.predict(x).numpy(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"rank": 0}, ValueError, "rank must be a positive integer"),
        ({"rank": True}, TypeError, "rank must be an integer"),
        (
            {"rank": 6},
            ValueError,
            r"rank 6 exceeds the rank of w, whose shape is \(6, 5\): at most 5",
        ),
        ({"alpha": float("nan")}, ValueError, "alpha must be a finite number"),
        ({"alpha": 0}, ValueError, "alpha must be a finite number other than 0"),
        ({"seed": -1}, ValueError, "seed must be an integer from 0"),
        ({"targets": "weigth"}, ValueError, "no weight matches 'weigth'; "),
        ({"targets": []}, ValueError, "at least one weight"),
        ({"targets": 3}, TypeError, "names or patterns"),
        ({"targets": lambda name: False}, ValueError, "chooses none"),
        ({"targets": "b"}, ValueError, "b is read by add in loss"),
        ({"values": None}, ValueError, "values must have the weights"),
        ({"values": {"u": np.ones(3)}}, ValueError, "loss has no parameter 'u'; it has x, w, b, v"),
        ({"values": {"w": [[1.0]]}}, TypeError, "w must be an array or a tensor"),
        ({"model": 3}, TypeError, "model must be a tvm.IRModule"),
    ],
)
def test_arguments(change, error, message):
    module, values = perceptron()
    arguments = {"model": module, "rank": 2, "targets": "w", "values": values, **change}
    with pytest.raises(error, match=message):
        lora(arguments.pop("model"), arguments.pop("rank"), arguments.pop("targets"), **arguments)


def test_adapters_of_adapters_are_refused(network, torch):
    from relax_grad.frontend.torch import from_module

    imported = from_module(network, (torch.randint(0, 11, (4, 7)),), loss=lambda y: y.sum())
    adapted = lora(imported, 2, LINEAR)
    with pytest.raises(ValueError, match="has an adapter already"):
        lora(adapted.model, 2, LINEAR)


def test_a_weight_of_two_kinds_of_layers(torch):
    from relax_grad.frontend.torch import from_module

    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(5, 3)

        def forward(self, places):
            return (self.table(places) @ self.table.weight.T).sum()

    imported = from_module(Tied(), (torch.zeros(2, dtype=torch.int64),))
    with pytest.raises(
        ValueError, match="read in two ways, as a weight of embedding and of linear"
    ):
        lora(imported, 1, "*")


def test_files(tmp_path):
    module, values = perceptron()
    adapted = lora(module, 2, "w", values=values)
    path = tmp_path / "adapters"
    adapted.save(path)
    for other in (
        lora(module, 3, "w", values=values),
        lora(module, 2, "w", alpha=3, values=values),
    ):
        with pytest.raises(ValueError, match=r"adapters of ..rank.: 2"):
            other.load(path)
    with pytest.raises(ValueError, match=r"v\.lora_A is missing"):
        lora(module, 2, "v", values=values).load(path)
    with pytest.raises(ValueError, match=r"has no adapter 'w\.lora_A'"):
        dataclasses.replace(adapted, params={}).load(path)
    data = path.read_bytes()
    for size in (0, 7, 40, len(data) - 3):
        path.write_bytes(data[:size])
        with pytest.raises(ValueError, match="damaged"):
            adapted.load(path)
    with pytest.raises(ValueError, match=r"w\.lora_A must have shape"):
        adapted.save(path, {**adapted.params, "w.lora_A": np.zeros((2, 5))})
    assert path.read_bytes() == data[: len(data) - 3]
