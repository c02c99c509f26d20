"""Imports, steps and adapters are printed in a few lines, whatever their size."""

from __future__ import annotations

import numpy as np
import pytest
from programs import tensor
from tvm import relax
from tvm.relax import op

from relax_grad.training import SGD, lora, train_step


def test_steps_and_adapters_of_a_module():
    x, w = tensor("x", (40, 60), "float32"), tensor("w", (60, 50), "float32")
    bb = relax.BlockBuilder()
    with bb.function("loss", [x, w]):
        bb.emit_func_output(bb.emit(op.mean(bb.emit(op.matmul(x, w)))))
    step = train_step(bb.get(), SGD(momentum=0.9), wrt="w")
    assert repr(step) == "TrainStep(batch: x (40, 60) float32; params: 1; optimizer_state: 2)"
    adapted = lora(bb.get(), 2, "w", values={"w": np.zeros((60, 50), "float32")})
    assert repr(adapted) == "Lora(adapters: 1; params: 2; base: 1)"


def test_an_import_of_pytorch():
    torch = pytest.importorskip("torch")
    from relax_grad.frontend.torch import from_module

    layers = [torch.nn.Linear(8, 8) for _ in range(9)]
    module, x = torch.nn.Sequential(*layers), torch.ones(4, 8)
    loss = torch.nn.functional.cross_entropy
    imported = from_module(module, (x,), loss=loss, targets=(torch.zeros(4, dtype=torch.int64),))
    assert repr(imported) == (
        "Imported(inputs: input (4, 8) float32; targets: target (4,) int64; "
        "outputs: output (4, 8) float32; params: 18)"
    )
    many = from_module(Many(), (dict.fromkeys("abcdefgh", x),))
    assert "and 2 more" in repr(many)


def Many():
    """Return a module with a dictionary of inputs."""
    import torch

    class Sum(torch.nn.Module):
        def forward(self, parts):
            return sum(part.mean() for part in parts.values())

    return Sum()


def test_an_import_of_onnx():
    pytest.importorskip("onnx", reason="the package onnx is not installed: extra onnx")
    from onnx_models import model_of, node

    from relax_grad.frontend.onnx import from_model

    weight = np.ones((6, 3), "float32")
    imported = from_model(model_of([node("MatMul", ["x", "w"])], {"x": (4, 6)}, {"w": weight}))
    assert repr(imported) == (
        "Imported(inputs: x (4, 6) float32; outputs: y (4, 3) float32; params: 1)"
    )
