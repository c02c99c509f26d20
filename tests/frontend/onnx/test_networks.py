"""Networks as PyTorch's exporters write them, with a symbolic batch and symbolic sizes, against
PyTorch at several sizes."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

import relax_grad

onnx = pytest.importorskip("onnx", reason="the package onnx is not installed: extra onnx")
torch = pytest.importorskip("torch", reason="PyTorch, the reference, is not installed")

import onnx_models as models  # noqa: E402
from tvm import relax  # noqa: E402

from relax_grad.frontend.onnx import from_model  # noqa: E402
from relax_grad.frontend.onnx.operators import support as support  # noqa: E402

from . import _exported_networks as networks  # noqa: E402
from ._exported_networks import IMAGE, STEPS, Network  # noqa: E402

nn, F = torch.nn, torch.nn.functional


class UNet(nn.Module):
    """Two levels, joined by a shortcut, for even sizes."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.down, self.up = nn.Conv2d(4, 4, 3, 2, 1), nn.ConvTranspose2d(4, 4, 2, 2)
        self.last = nn.Conv2d(8, 2, 1)

    def forward(self, x):
        first = F.silu(self.norm(self.first(x)))
        return self.last(torch.cat([first, self.up(F.relu(self.down(first)))], 1))


class Speech(nn.Module):
    """Convolutions over a signal, positions by their number of frames, and attention, as in wav2vec
    2.0."""

    def __init__(self):
        super().__init__()
        self.front = nn.Sequential(nn.Conv1d(1, 8, 10, 5), nn.GELU(), nn.Conv1d(8, 8, 3, 2))
        self.places, self.qkv = nn.Embedding(40, 8), nn.Linear(8, 24)

    def forward(self, x):
        hidden = self.front(x.unsqueeze(1)).transpose(1, 2)
        frames = (torch.div(x.shape[1] - 10, 5, rounding_mode="floor") + 1 - 3) // 2 + 1
        hidden = hidden + self.places(torch.arange(frames))
        q, k, v = self.qkv(hidden).chunk(3, -1)
        return torch.softmax(q @ k.transpose(1, 2), -1) @ v


class Detector(nn.Module):
    """Heads of two levels with a grid of cells, as in YOLO."""

    def __init__(self):
        super().__init__()
        self.stem, self.down = nn.Conv2d(2, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, 2, 1)
        self.heads = nn.ModuleList([nn.Conv2d(4, 10, 1), nn.Conv2d(4, 10, 1)])

    def forward(self, x):
        large = F.silu(self.stem(x))
        small = F.silu(self.down(large))
        large = large + F.interpolate(small, scale_factor=2.0)
        boxes = []
        for level, head in zip((large, small), self.heads, strict=True):
            y = head(level)
            batch, _, rows, columns = y.shape
            y = y.view(batch, 2, 5, rows, columns).permute(0, 1, 3, 4, 2).sigmoid()
            places = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
            centre = y[..., :2] * 2 + torch.stack(places[::-1], -1).to(y.dtype)
            boxes.append(torch.cat([centre / 10, y[..., 2:]], -1).view(batch, -1, 5))
        return torch.cat(boxes, 1)


class Windows(nn.Module):
    """Pictures padded to a multiple of the window, whose elements are shifted and mixed, as in
    Swin."""

    def __init__(self):
        super().__init__()
        self.mix, self.norm = nn.Linear(12, 12), nn.LayerNorm(3)

    def forward(self, x):
        rows, columns = x.shape[1:3]
        x = F.pad(self.norm(x), [0, 0, 0, columns % 2, 0, rows % 2])
        batch, rows, columns, count = x.shape
        x = torch.roll(x, (-1, -1), (1, 2)).view(batch, rows // 2, 2, columns // 2, 2, count)
        x = self.mix(x.permute(0, 1, 3, 2, 4, 5).reshape(-1, 4 * count))
        return x.view(batch, rows // 2, columns // 2, 4 * count)


def super_resolution():
    return nn.Sequential(
        nn.Conv2d(2, 4, 5, padding=2, padding_mode="reflect"), nn.Tanh(),
        nn.Conv2d(4, 9, 3, padding=1),
        nn.PixelShuffle(3),
    )  # fmt: skip


class Text(nn.Module):
    """A recurrent layer in both directions over words, and the mean and the last of its steps."""

    def __init__(self):
        super().__init__()
        self.words, self.rnn = (
            nn.Embedding(20, 4),
            nn.GRU(4, 3, batch_first=True, bidirectional=True),
        )
        self.head = nn.Linear(12, 2)

    def forward(self, ids):
        hidden, _ = self.rnn(self.words(ids))
        return self.head(torch.cat([hidden.mean(1), hidden[:, -1]], -1))


NETWORKS = {
    "unet": Network(UNet, ((2, 2, 6, 8), (1, 2, 4, 10)), IMAGE),
    "speech": Network(Speech, ((2, 60), (1, 83)), {0: "batch", 1: "samples"}),
    "detector": Network(Detector, ((2, 2, 8, 12), (1, 2, 12, 8)), IMAGE),
    "windows": Network(Windows, ((2, 5, 4, 3), (1, 4, 7, 3)),
    {0: "batch", 1: "height", 2: "width"}),
    "super_resolution": Network(super_resolution, ((2, 2, 5, 6), (1, 2, 4, 9)), IMAGE),
    "text": Network(Text, ((2, 7), (3, 5)), STEPS, True),
    **networks.NETWORKS,
}  # fmt: skip


@pytest.mark.parametrize(
    "dynamo",
    [False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["tracing", "dynamo"],
)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_trains_with_symbolic_sizes(tmp_path, name, dynamo):
    if dynamo and importlib.util.find_spec("onnxscript") is None:
        pytest.skip("onnxscript is not installed, with which PyTorch's newer exporter writes files")
    network = NETWORKS[name]
    module = networks.module_of(network)
    first = networks.drawn(network, network.shapes[0])
    networks.export(module, first, network.axes, tmp_path / "model.onnx", dynamo)
    imported = from_model(tmp_path / "model.onnx")
    for axis in network.axes:
        assert not isinstance(imported.inputs["x"].shape.values[axis], int)

    def loss(bb, y):
        return bb.emit(relax.op.mean(relax.op.multiply(y, y)))

    names = list(imported.params)
    module_of = relax_grad.value_and_grad(imported.with_loss(loss), "loss", wrt=names)
    call, params = models.compiled(module_of, "loss_adjoint"), dict(module.named_parameters())
    for shape in network.shapes:
        x = networks.drawn(network, shape)
        result, gradients = call(x.numpy(), *imported.values)
        module.zero_grad()
        expected = module(x).square().mean()
        expected.backward()
        np.testing.assert_allclose(result, expected.item(), rtol=1e-6)
        total = sum(float(param.grad.square().sum()) for param in params.values())
        mine = sum(float(np.square(grad).sum()) for grad in gradients)
        np.testing.assert_allclose(mine, total, rtol=1e-5)
        for key, gradient in zip(names, gradients, strict=True):
            if key in params and params[key].shape == gradient.shape:
                wanted = params[key].grad.numpy()
                np.testing.assert_allclose(gradient, wanted, 1e-5, 1e-8, err_msg=key)


def operators_of(graph):
    for node in graph.node:
        yield node.domain, node.op_type
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from operators_of(attribute.g)


#: The operators that ONNX Runtime's optimizer writes for these networks.
WRITTEN = {"FusedConv", "FusedMatMul", "QuickGelu", "BiasGelu"}


def test_files_optimised_at_the_extended_level_train(tmp_path):
    reason = "onnxruntime, which optimises the files, is not installed"
    runtime = pytest.importorskip("onnxruntime", reason=reason)
    table = {"": support.STANDARD_OPERATORS, "com.microsoft": support.MICROSOFT_OPERATORS}
    written = set()
    for name in ("mobile_net", "llama", "vision_transformer", "conformer"):
        network = NETWORKS[name]
        module = networks.module_of(network, torch.float32)
        x = networks.drawn(network, network.shapes[0], torch.float32)
        path, optimised = tmp_path / f"{name}.onnx", tmp_path / f"{name}.extended.onnx"
        networks.export(module, x, network.axes, path, dynamo=False)
        options = runtime.SessionOptions()
        options.log_severity_level = 3
        options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        options.optimized_model_filepath = str(optimised)
        session = runtime.InferenceSession(str(path), options)
        operators = set(operators_of(onnx.load(optimised).graph))
        assert not [(d, kind) for d, kind in operators if kind not in table.get(d, {})], name
        written |= {kind for domain, kind in operators if domain}
        imported, plain = from_model(optimised), from_model(path)
        count, wanted = (
            sum(int(np.prod(value.shape)) for value in model.params.values())
            for model in (imported, plain)
        )
        # Normalisations of batches are parts of convolutions, and parts of a layer are joined.
        assert 0.9 * wanted <= count <= 1.05 * wanted, name
        x = networks.drawn(network, network.shapes[1], torch.float32).numpy()
        result = models.outputs(imported, {"x": x})[0]
        np.testing.assert_allclose(result, session.run(None, {"x": x})[0], 1e-4, 1e-5)
    assert written >= WRITTEN
