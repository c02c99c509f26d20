"""Files that onnxruntime's quantisers write: dynamic and static quantisation of a small network."""

from __future__ import annotations

import numpy as np
import pytest

import relax_grad

onnx = pytest.importorskip("onnx", reason="the package onnx is not installed: extra onnx")
runtime = pytest.importorskip("onnxruntime", reason="onnxruntime, the quantiser, is not installed")

import onnx_models as models  # noqa: E402
from onnx_models import node, normal  # noqa: E402
from onnxruntime import quantization  # noqa: E402
from tvm import relax  # noqa: E402

from relax_grad.frontend.onnx import UnsupportedOperatorError, from_model  # noqa: E402
from relax_grad.training import SGD, train_step  # noqa: E402

SHAPE = (2, 3, 5, 6)


def network():
    """Return a network of a convolution, element-wise operators and two dense layers."""
    nodes = [
        node("Conv", ["x", "conv.weight", "conv.bias"], ["a"], pads=[1, 1, 1, 1]),
        node("Sigmoid", ["a"], ["s"]),
        node("Add", ["a", "s"], ["b"]),
        node("GlobalAveragePool", ["b"], ["p"]),
        node("Flatten", ["p"], ["f"]),
        node("MatMul", ["f", "first.weight"], ["g"]),
        node("Add", ["g", "first.bias"], ["h"]),
        node("Relu", ["h"], ["r"]),
        node("MatMul", ["r", "last.weight"]),
    ]
    weights = {
        "conv.weight": normal(4, 3, 3, 3) / 3,
        "conv.bias": normal(4),
        "first.weight": normal(4, 6),
        "first.bias": normal(6),
        "last.weight": normal(6, 3),
    }
    return models.model_of(nodes, {"x": ["n", *SHAPE[1:]]}, weights, opset=17), weights


class Reader(quantization.CalibrationDataReader):
    """Two pictures."""

    def __init__(self):
        self.left = [normal(*SHAPE), normal(*SHAPE)]

    def get_next(self):
        return {"x": self.left.pop()} if self.left else None


#: Weights of 7 bits: on processors without VNNI, products of 8 bits saturate in ONNX Runtime.
SEVEN_BITS = {"reduce_range": True}


def by_runtime(path, x):
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    return runtime.InferenceSession(str(path), options).run(None, {"x": x})[0]


def test_products_of_dynamic_quantisation_are_products_of_floats(tmp_path):
    torch = pytest.importorskip("torch", reason="PyTorch, the reference, is not installed")
    model, weights = network()
    path, x = tmp_path / "dynamic.onnx", normal(*SHAPE)
    options = {"op_types_to_quantize": ["MatMul"], "per_channel": True, **SEVEN_BITS}
    quantization.quantize_dynamic(model, path, **options)
    kinds = [proto.op_type for proto in onnx.load(path).graph.node]
    assert kinds.count("MatMulInteger") == kinds.count("DynamicQuantizeLinear") == 2
    imported = from_model(path)
    assert list(imported.params) == ["conv.weight", "conv.bias", "first.bias"]
    reason = imported.explain()["last.weight_quantized"].reason
    assert reason.startswith("it holds integers, as operand of DequantizeLinear")
    result = models.outputs(imported, {"x": x})[0]
    np.testing.assert_allclose(result, by_runtime(path, x), rtol=1e-4, atol=1e-5)

    def rounded(data):
        low, high = min(data.min().item(), 0.0), max(data.max().item(), 0.0)
        scale = (high - low) / 255
        zero = round(-low / scale)
        return torch.fake_quantize_per_tensor_affine(data, scale, zero, 0, 255)

    values = {tensor.name: tensor for tensor in onnx.load(path).graph.initializer}

    def dequantized(name):
        parts = ("quantized", "zero_point", "scale")
        q, zero, scale = (onnx.numpy_helper.to_array(values[f"{name}_{part}"]) for part in parts)
        return torch.tensor((q.astype("float32") - zero.astype("float32")) * scale)

    v = {name: torch.tensor(weights[name], requires_grad=True) for name in imported.params}
    a = torch.conv2d(torch.tensor(x), v["conv.weight"], v["conv.bias"], padding=1)
    p = (a + a.sigmoid()).mean((2, 3))
    r = (rounded(p) @ dequantized("first.weight") + v["first.bias"]).relu()
    y = rounded(r) @ dequantized("last.weight")
    y.square().sum().backward()

    def loss(bb, y):
        return bb.emit(relax.op.sum(relax.op.multiply(y, y)))

    module = relax_grad.value_and_grad(imported.with_loss(loss), "loss", wrt=list(v))
    _, gradients = models.compiled(module, "loss_adjoint")(x, *imported.values)
    for name, grad in zip(v, gradients, strict=True):
        wanted = v[name].grad.numpy()
        limit = 1e-4 * np.abs(wanted).max()
        np.testing.assert_allclose(grad, wanted, 1e-3, limit, err_msg=name)


def test_convolutions_of_dynamic_quantisation_have_the_values_of_the_runtime(tmp_path):
    path, x = tmp_path / "dynamic.onnx", normal(*SHAPE)
    quantization.quantize_dynamic(network()[0], path, **SEVEN_BITS)
    kinds = {proto.op_type for proto in onnx.load(path).graph.node}
    assert {"ConvInteger", "MatMulInteger"} <= kinds
    imported = from_model(path)
    assert list(imported.params) == ["conv.bias", "first.bias"]
    with pytest.raises(ValueError, match=r"conv.weight_quantized cannot be trained: it holds int"):
        from_model(path, trainable="conv.weight*")
    result = models.outputs(imported, {"x": x})[0]
    np.testing.assert_allclose(result, by_runtime(path, x), rtol=1e-4, atol=1e-5)


def test_a_product_that_is_no_product_of_dynamic_quantisation_stays():
    """The integers have another user: no gradient passes them, and none their scale."""
    nodes = [
        node("Mul", ["x", "f"], ["d"]),
        node("DynamicQuantizeLinear", ["d"], ["q", "s", "z"]),
        node("MatMulInteger", ["q", "w", "z"], ["i"]),
        node("Cast", ["i"], ["c"], to=onnx.TensorProto.FLOAT),
        node("Mul", ["s", "t"], ["u"]),
        node("Mul", ["c", "u"], ["p"]),
        node("Add", ["p", "c"], ["e"]),
        node("Add", ["e", "bias"], ["o"]),
        node("ReduceSum", ["d"], ["r"], keepdims=0),
        node("Add", ["o", "r"]),
    ]
    weights = {
        "f": normal(4),
        "w": np.arange(12, dtype="uint8").reshape(4, 3),
        "t": np.float32(0.5),
        "bias": normal(3),
    }
    model, x = models.model_of(nodes, {"x": [2, 4]}, weights), normal(2, 4)
    imported = from_model(model)
    assert list(imported.params) == ["bias"]
    models.check_outputs(imported, model, {"x": x}, rtol=1e-4, atol=1e-4)
    models.check_outputs(imported, model, {"x": np.zeros((2, 4), "float32")})
    imported = from_model(model, trainable="f")
    module = relax_grad.value_and_grad(imported.with_loss(models.weighted_sum), "loss", wrt=["f"])
    _, (grad,) = models.compiled(module, "loss_adjoint")(x, *imported.values)
    np.testing.assert_allclose(grad, np.cos(np.arange(6)).sum() * x.sum(0), rtol=1e-4)


def quantised(path, **arguments):
    quantization.quantize_static(network()[0], path, Reader(), **arguments)
    return path


def test_operators_on_quantised_numbers_are_refused_with_advice(tmp_path):
    path = quantised(tmp_path / "q.onnx", quant_format=quantization.QuantFormat.QOperator)
    nodes = {proto.op_type: proto.name for proto in onnx.load(path).graph.node}
    kinds = {"QLinearConv", "QLinearMatMul", "QLinearAdd", "QLinearSigmoid"}
    assert kinds <= nodes.keys()
    with pytest.raises(UnsupportedOperatorError) as error:
        from_model(path)
    for kind in kinds:
        line = next(text for text in str(error.value).splitlines() if f"{kind}:" in text)
        assert nodes[kind] in line
        assert "import the float model, or one with QuantizeLinear and Dequ" in line
        assert "AddQDQPairToWeight" in line


def test_the_advice_for_quantised_files_gives_weights_that_train(tmp_path):
    options = {"quant_format": quantization.QuantFormat.QDQ, **SEVEN_BITS}
    path = quantised(tmp_path / "integers.onnx", **options)
    imported = from_model(path)
    assert not imported.params
    assert imported.explain()["conv.weight_quantized"].reason.endswith(
        "quantise with float weights after QuantizeLinear to train it"
    )
    with pytest.raises(ValueError, match=r"no trainable parameter; print\(imported.explain\(\)"):
        train_step(imported, SGD(lr=0.1), loss=lambda bb, y: bb.emit(relax.op.sum(y)))
    extra = {"AddQDQPairToWeight": True}
    path = quantised(tmp_path / "floats.onnx", **options, extra_options=extra)
    imported, x = from_model(path), normal(*SHAPE)
    assert {"conv.weight", "first.weight", "last.weight"} <= imported.params.keys()
    result = models.outputs(imported, {"x": x})[0]
    np.testing.assert_allclose(result, by_runtime(path, x), rtol=1e-4, atol=1e-4)
