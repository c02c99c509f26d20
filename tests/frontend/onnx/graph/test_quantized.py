"""Models of quantisation-aware training: values and gradients by PyTorch's straight-through
estimator."""

from __future__ import annotations

import numpy as np
import pytest

import relax_grad

onnx = pytest.importorskip("onnx", reason="the package onnx is not installed: extra onnx")
torch = pytest.importorskip("torch", reason="PyTorch, the reference, is not installed")

import onnx_models as models  # noqa: E402
from onnx_models import node, normal  # noqa: E402

from relax_grad.frontend.onnx import from_model  # noqa: E402


def pair(name, result, scale, zero=None, **attributes):
    """Return a quantisation and a dequantisation."""
    more = [scale] if zero is None else [scale, zero]
    return [
        node("QuantizeLinear", [name, *more], [f"{result}q"], **attributes),
        node("DequantizeLinear", [f"{result}q", *more], [result], **attributes),
    ]


def network():
    """Return a model with quantised activations and weights, by one scale and by one for each
    column."""
    nodes = [
        *pair("x", "xd", "s"),
        *pair("w1", "w1d", "t", "z", axis=1),
        node("MatMul", ["xd", "w1d"], ["h"]),
        *pair("h", "hd", "s", "n"),
        *pair("w2", "w2d", "small", "one"),
        node("MatMul", ["hd", "w2d"], ["m"]),
        node("Add", ["m", "b"]),
    ]
    weights = {
        "s": np.float32(0.0625),
        "n": np.uint8(128),
        "w1": 2 * normal(4, 6),
        "t": np.linspace(0.01, 0.02, 6).astype("float32"),
        "z": np.zeros(6, "int8"),
        "small": np.float32([0.03125]),
        "one": np.int8([3]),
        "w2": 2 * normal(6, 3),
        "b": normal(3),
    }
    return models.model_of(nodes, {"x": [5, 4]}, weights), weights


def reference(x, v):
    """Return the output by PyTorch; the values are tensors by name."""
    quantized = torch.fake_quantize_per_tensor_affine
    data = quantized(x, 0.0625, 0, 0, 255)
    zeros = torch.zeros(6, dtype=torch.int32)
    w1 = torch.fake_quantize_per_channel_affine(v["w1"], v["t"], zeros, 1, -128, 127)
    hidden = quantized(data @ w1, 0.0625, 128, 0, 255)
    return hidden @ quantized(v["w2"], 0.03125, 3, -128, 127) + v["b"]


def test_weights_behind_quantisation_train():
    model, weights = network()
    imported = from_model(model)
    assert list(imported.params) == ["w1", "w2", "b"]
    assert imported.explain()["w1"].reason == "it is a weight of the MatMul h"
    assert imported.explain()["t"].kind == "constant"
    names = list(imported.params)
    module = relax_grad.value_and_grad(imported.with_loss(models.weighted_sum), "loss", wrt=names)
    call, x = models.compiled(module, None), 4 * np.abs(normal(5, 4))
    values = {name: torch.tensor(value) for name, value in weights.items()}
    for name in names:
        values[name].requires_grad_()
    wanted = reference(torch.tensor(x), values)
    factors = torch.cos(torch.arange(15, dtype=torch.float64)).reshape(5, 3).float()
    (wanted * factors).sum().backward()
    result = call("main", x, *imported.values)
    np.testing.assert_allclose(result, wanted.detach().numpy(), rtol=1e-4, atol=1e-4)
    _, gradients = call("loss_adjoint", x, *imported.values)
    for name, gradient in zip(names, gradients, strict=True):
        grad = values[name].grad.numpy()
        np.testing.assert_allclose(gradient, grad, rtol=1e-4, atol=1e-4, err_msg=name)
    assert (values["w1"].grad == 0).any()  # outside of the range
    assert (values["w1"].grad != 0).any()


def test_a_tie_is_rounded_to_the_even_multiple():
    nodes = [*pair("x", "d", "s", "n"), node("Mul", ["d", "w"])]
    weights = {"s": np.float32(0.5), "n": np.int8(0), "w": np.ones(6, "float32")}
    model = models.model_of(nodes, {"x": [6]}, weights, opset=21)
    x = np.float32([0.25, 0.75, 1.25, -0.25, -0.75, 100.0])
    (result,) = models.outputs(from_model(model), {"x": x})
    np.testing.assert_array_equal(result, models.wanted(model, {"x": x})[0])
    np.testing.assert_array_equal(result, [0, 1, 1, 0, -1, 63.5])


def test_a_pair_with_two_scales_is_no_estimator():
    nodes = [
        node("QuantizeLinear", ["w", "s", "n"], ["q"]),
        node("DequantizeLinear", ["q", "t", "n"], ["d"]),
        node("MatMul", ["x", "d"], ["h"]),
        node("Add", ["h", "b"]),
    ]
    weights = {
        "w": normal(4, 3),
        "s": np.float32(0.5),
        "t": np.float32(0.25),
        "n": np.int8(0),
        "b": normal(3),
    }
    model = models.model_of(nodes, {"x": [2, 4]}, weights)
    assert list(from_model(model).params) == ["b"]
    with pytest.raises(ValueError, match=r"no gradient reaches w, because .* the QuantizeLinear q"):
        from_model(model, trainable="w")
