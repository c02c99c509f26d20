"""A transformer with a symbolic batch, symbolic steps and a mask, as PyTorch's exporters write it,
against PyTorch."""

from __future__ import annotations

import importlib.util
import warnings

import numpy as np
import pytest

import relax_grad

onnx = pytest.importorskip("onnx", reason="the package onnx is not installed: extra onnx")
torch = pytest.importorskip("torch", reason="PyTorch, the reference, is not installed")

import onnx_models as models  # noqa: E402
from tvm import relax  # noqa: E402

from relax_grad.frontend.onnx import from_model  # noqa: E402


class Transformer(torch.nn.Module):
    """Causal attention with a mask of the keys, a table of positions, a buffer of the mask, and
    tied heads' shapes."""

    def __init__(self, words=30, width=8, heads=2, most=16):
        super().__init__()
        self.heads = heads
        self.words, self.places = (
            torch.nn.Embedding(words, width),
            torch.nn.Embedding(most, width),
        )
        self.register_buffer("seen", torch.ones(most, most, dtype=torch.bool).tril())
        self.norm, self.qkv = torch.nn.LayerNorm(width), torch.nn.Linear(width, 3 * width)
        self.out, self.head = torch.nn.Linear(width, width), torch.nn.Linear(width, words)

    def forward(self, ids, mask):
        batch, steps = ids.shape
        x = self.words(ids) + self.places(torch.arange(steps).unsqueeze(0))
        split = (
            part.reshape(batch, steps, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        q, k, v = split
        scores = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5
        kept = self.seen[:steps, :steps] & mask[:, None, None, :].bool()
        scores = scores.masked_fill(~kept, torch.finfo(scores.dtype).min)
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, steps, -1))
        return self.head(x[:, steps // 2 :])


def exported(model, path, dynamo: bool):
    ids, mask = torch.randint(0, 30, (2, 10)), torch.ones(2, 10, dtype=torch.int64)
    names = {"input_names": ["ids", "mask"], "output_names": ["y"]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if dynamo:
            axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("steps", max=16)}
            options = {"dynamo": True, "dynamic_shapes": (axes, axes), "verbose": False}
        else:
            axes = {0: "batch", 1: "steps"}
            # Equal weights would be one parameter, and others be stored in another layout.
            training = torch.onnx.TrainingMode.TRAINING
            options = {
                "dynamo": False,
                "do_constant_folding": False,
                "dynamic_axes": {"ids": axes, "mask": axes},
                "training": training,
            }
        torch.onnx.export(model, (ids, mask), path, **names, **options)


@pytest.mark.parametrize("dynamo", [False, True])
def test_a_transformer_trains_with_symbolic_batch_and_steps(tmp_path, dynamo):
    if dynamo and importlib.util.find_spec("onnxscript") is None:
        pytest.skip("onnxscript is not installed, with which PyTorch's newer exporter writes files")
    torch.manual_seed(0)
    model = Transformer().double()
    with torch.no_grad():
        for param in model.parameters():
            param += 0.05 * torch.randn_like(param)
    exported(model, str(tmp_path / "model.onnx"), dynamo)
    imported = from_model(tmp_path / "model.onnx")
    assert str(imported.outputs["y"].shape[0]) == "batch"
    params = dict(model.named_parameters())
    assert sorted(imported.params) == sorted(params) or dynamo

    def loss(bb, y):
        return bb.emit(relax.op.mean(relax.op.multiply(y, y)))

    module = relax_grad.value_and_grad(imported.with_loss(loss), "loss", wrt=list(imported.params))
    call = models.compiled(module, "loss_adjoint")
    for batch, steps in ((2, 10), (3, 7), (1, 16)):
        ids = torch.randint(0, 30, (batch, steps))
        mask = torch.ones(batch, steps, dtype=torch.int64)
        mask[0, steps - 2 :] = 0
        result, gradients = call(ids.numpy(), mask.numpy(), *imported.values)
        model.zero_grad()
        expected = model(ids, mask).square().mean()
        expected.backward()
        np.testing.assert_allclose(result, expected.item(), rtol=1e-6)
        wanted = {name: weight.grad.numpy() for name, weight in params.items()}
        # The newer exporter stores some weights transposed, under names of its own.
        squares = sum(float(np.square(grad).sum()) for grad in gradients)
        total = sum(float(np.square(grad).sum()) for grad in wanted.values())
        np.testing.assert_allclose(squares, total, rtol=1e-5)
        for name, gradient in zip(imported.params, gradients, strict=True):
            if name in wanted:
                np.testing.assert_allclose(gradient, wanted[name], 1e-5, 1e-8, err_msg=name)
