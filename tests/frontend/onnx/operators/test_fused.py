"""Operators of ONNX Runtime and losses in the graph: values and gradients by PyTorch in float64,
many in one module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import pytest
from tvm import relax

import relax_grad

onnx = pytest.importorskip("onnx", reason="the package onnx is not installed: extra onnx")
torch = pytest.importorskip("torch", reason="PyTorch, the reference, is not installed")

import onnx_models as models  # noqa: E402
from onnx import TensorProto, helper  # noqa: E402
from onnx_models import node, normal  # noqa: E402

from relax_grad.frontend.onnx import UnsupportedOperatorError, from_model  # noqa: E402

F = torch.nn.functional

MICROSOFT = "com.microsoft"


class Case(NamedTuple):
    """A node on the input ``x`` of shape (2, 6, 8), and the same in PyTorch.

    ``weights`` are parameters in float64, and other arrays constants. The function takes x and all
    of them.
    """

    kind: str
    weights: dict[str, np.ndarray]
    function: Callable
    attributes: Mapping = MappingProxyType({})
    domain: str = MICROSOFT
    count: int = 1


def double(*shape):
    return normal(*shape, dtype="float64")


def rms(x, weight, epsilon=2.0**-17):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + epsilon) * weight


def rotated(x, positions, cosines, sines, heads=2, interleaved=False, width=4):
    """Return the rotary embedding in the layout (batch, steps, heads * size)."""
    b, s, _ = x.shape
    y = x.reshape(b, s, heads, -1)
    c, d = cosines[positions].unsqueeze(-2), sines[positions].unsqueeze(-2)
    turned, rest = y[..., :width], y[..., width:]
    if interleaved:
        even, other = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack([even * c - other * d, other * c + even * d], -1).flatten(-2)
    else:
        even, other = turned.chunk(2, -1)
        turned = torch.cat([even * c - other * d, other * c + even * d], -1)
    return torch.cat([turned, rest], -1).reshape(x.shape)


ANGLES = np.outer(np.arange(9), [1.0, 0.1])
TABLES = {"cos_cache": np.cos(ANGLES), "sin_cache": np.sin(ANGLES)}
POSITIONS = np.array([[0, 2, 4, 6, 7, 8], [1, 2, 3, 4, 5, 6]])

CASES = {
    "matmul": Case("FusedMatMul", {"w": double(5, 8)}, lambda x, w: 0.5 * x @ w.T,
    {"transB": 1, "alpha": 0.5}),
    "matmul_a": Case("FusedMatMul", {"w": double(6, 3)}, lambda x, w: x.mT @ w, {"transA": 1}),
    "quick_gelu": Case("QuickGelu", {}, lambda x: x * torch.sigmoid(1.5 * x), {"alpha": 1.5}),
    "gelu": Case("Gelu", {}, F.gelu),
    "bias_gelu": Case("BiasGelu", {"b": double(8)}, lambda x, b: F.gelu(x + b)),
    "fast_gelu": Case("FastGelu", {"b": double(8)}, lambda x, b: F.gelu(x + b, approximate="tanh")),
    "skip_layer_norm": Case(
        "SkipLayerNormalization",
        {"skip": double(2, 6, 8), "g": double(8), "b": double(8), "bias": double(8)},
        lambda x, s, g, b, c: (F.layer_norm(x + s + c, (8,), g, b, 2.0**-10), x + s + c),
        {"epsilon": 2.0**-10},
        count=4,
    ),
    "skip_layer_norm_short": Case(
        "SkipLayerNormalization",
        {"skip": double(2, 6, 8), "g": double(8)},
        lambda x, s, g: F.layer_norm(x + s, (8,), g, None, 1e-12),
    ),
    "simplified": Case("SimplifiedLayerNormalization", {"g": double(8)}, rms, {"epsilon": 2.0**-17},
    domain=""),
    "skip_simplified": Case(
        "SkipSimplifiedLayerNormalization",
        {"skip": double(2, 6, 8), "g": double(8), "bias": double(8)},
        lambda x, s, g, c: (rms(x + s + c, g, 2.0**-20), x + s + c),
        {"epsilon": 2.0**-20},
        count=4,
    ),
    "rotary": Case(
        "RotaryEmbedding",
        {"positions": POSITIONS, **TABLES},
        rotated,
        {"num_heads": 2},
    ),
    "rotary_interleaved": Case(
        "RotaryEmbedding",
        {"positions": np.array([3]), **TABLES},
        lambda x, p, c, s: rotated(x, p + torch.arange(6).expand(2, 6), c, s, 2, True),
        {"interleaved": 1},
    ),
    "rotary_part": Case(
        "RotaryEmbedding",
        {"positions": POSITIONS, **TABLES},
        lambda x, p, c, s: rotated(x, p, c, s, 1),
        {"num_heads": 1, "rotary_embedding_dim": 4},
    ),
    "celu": Case("Celu", {}, lambda x: F.celu(x, 0.75), {"alpha": 0.75}, domain=""),
    "lp_1": Case("LpNormalization", {}, lambda x: F.normalize(x, 1, 1), {"axis": 1, "p": 1},
    domain=""),
    "lp_2": Case("LpNormalization", {}, lambda x: F.normalize(x, 2, -1), {}, domain=""),
    "cross_entropy": Case(
        "SoftmaxCrossEntropyLoss",
        {"labels": np.array([[0, 5, 3, 1, 2, 4, 0, 3], [5, 3, 3, 0, 1, 2, 2, 3]]),
            "shares": np.arange(1.0, 7.0)},
        lambda x, labels, w: (F.cross_entropy(x, labels, w, ignore_index=3), F.log_softmax(x, 1)),
        {"ignore_index": 3},
        domain="",
        count=2,
    ),
    "nll": Case(
        "NegativeLogLikelihoodLoss",
        {"labels": np.array([[0, 5, 3, 1, 2, 4, 0, 3], [5, 3, 3, 0, 1, 2, 2, 3]])},
        lambda x, labels: F.nll_loss(x, labels, reduction="none"),
        {"reduction": "none"},
        domain="",
    ),
}  # fmt: skip

#: The results of a node that the model returns, by the number of its results.
RETURNED = {1: [0], 2: [0, 1], 4: [0, 3]}


def model_of(dtype):
    """Return a model of all cases on the product of the input and a weight."""
    nodes, weights, outputs = [node("Mul", ["z", "factor.weight"], ["x"])], {}, []
    weights["factor.weight"] = double(2, 6, 8)
    for name, case in CASES.items():
        results = [""] * case.count
        for i in RETURNED[case.count]:
            results[i] = f"{name}_{i}"
        outputs += [output for output in results if output]
        operands = ["x", *(f"{name}.{key}" for key in case.weights)]
        attributes = {"domain": case.domain, **case.attributes}
        nodes.append(helper.make_node(case.kind, operands, results, **attributes))
        weights |= {f"{name}.{key}": value for key, value in case.weights.items()}
    conv = ["image", "fused_conv.weight", "fused_conv.bias", "image"]
    more = {"activation": "LeakyRelu", "activation_params": [0.25], "pads": [1, 1, 1, 1]}
    nodes.append(helper.make_node("FusedConv", conv, ["conv"], domain=MICROSOFT, **more))
    gemm = ["row", "fused_gemm.weight", "fused_gemm.bias"]
    more = {"activation": "Tanh", "transB": 1, "alpha": 0.5}
    nodes.append(helper.make_node("FusedGemm", gemm, ["gemm"], domain=MICROSOFT, **more))
    weights |= {
        "fused_conv.weight": double(3, 3, 3, 3),
        "fused_conv.bias": double(3),
        "fused_gemm.weight": double(4, 5),
        "fused_gemm.bias": double(4),
    }
    weights = {
        name: value.astype(dtype) if value.dtype == "float64" else value
        for name, value in weights.items()
    }
    shapes = {"z": [2, 6, 8], "image": [1, 3, 4, 4], "row": [3, 5]}
    model = models.model_of(
        nodes, shapes, weights, (*outputs, "conv", "gemm"), opset=17, dtype=dtype
    )
    model.opset_import.append(helper.make_opsetid(MICROSOFT, 1))
    return model


def reference(values):
    """Return the outputs by PyTorch; the values are tensors by name."""
    x, results = values["z"] * values["factor.weight"], []
    for name, case in CASES.items():
        result = case.function(x, *(values[f"{name}.{key}"] for key in case.weights))
        results += result if isinstance(result, tuple) else [result]
    weight, bias = values["fused_conv.weight"], values["fused_conv.bias"]
    summed = F.conv2d(values["image"], weight, bias, padding=1) + values["image"]
    product = 0.5 * values["row"] @ values["fused_gemm.weight"].T
    return [*results, F.leaky_relu(summed, 0.25), torch.tanh(product + values["fused_gemm.bias"])]


def tensors(model, feeds):
    constants = {
        tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer
    }
    return {name: torch.tensor(value) for name, value in {**constants, **feeds}.items()}


def feeds_of(dtype):
    shapes = {"z": (2, 6, 8), "image": (1, 3, 4, 4), "row": (3, 5)}
    return {name: normal(*shape, dtype=dtype) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def compiled():
    """The results of all cases in float64, the gradients, and the same by PyTorch."""
    model, feeds = model_of("float64"), feeds_of("float64")
    imported = from_model(model)
    names = list(imported.params)
    module = relax_grad.value_and_grad(imported.with_loss(models.weighted_sum), "loss", wrt=names)
    call = models.compiled(module, None)
    arguments = [*(feeds[name] for name in imported.inputs), *imported.values]
    results = call("main", *arguments)
    _, gradients = call("loss_adjoint", *arguments)
    values = tensors(model, feeds)
    for name in names:
        values[name].requires_grad_()
    wanted = reference(values)
    total = sum(
        (
            value * torch.cos(torch.arange(value.numel(), dtype=torch.float64)).reshape(value.shape)
        ).sum()
        for value in wanted
    )
    total.backward()
    outputs = dict(zip(imported.outputs, zip(results, wanted, strict=True), strict=True))
    grads = {
        name: (grad, values[name].grad.numpy()) for name, grad in zip(names, gradients, strict=True)
    }
    return imported, outputs, grads


@pytest.mark.parametrize("case", [*CASES, "conv", "gemm"])
def test_values(compiled, case):
    _, outputs, _ = compiled
    own = {
        name: both
        for name, both in outputs.items()
        if name.rpartition("_")[0] == case or name == case
    }
    assert own
    for result, wanted in own.values():
        np.testing.assert_allclose(result, wanted.detach().numpy(), rtol=1e-9, atol=1e-10)


def test_gradients(compiled):
    imported, _, gradients = compiled
    trained = {
        f"{name}.{key}"
        for name, case in CASES.items()
        for key in case.weights
        if key in ("w", "b", "g", "bias")
    }
    fused = {f"fused_{kind}.{part}" for kind in ("conv", "gemm") for part in ("weight", "bias")}
    assert trained | fused | {"factor.weight"} <= {*gradients}
    assert {"rotary.cos_cache", "rotary.sin_cache"} <= {*imported.frozen}
    assert imported.explain()["cross_entropy.shares"].kind == "constant"
    for name, (grad, wanted) in gradients.items():
        np.testing.assert_allclose(grad, wanted, rtol=1e-8, atol=1e-9, err_msg=name)


def test_the_reference_is_onnxruntime():
    reason = "onnxruntime is not installed, with which the reference is compared"
    runtime = pytest.importorskip("onnxruntime", reason=reason)
    model, feeds = model_of("float32"), feeds_of("float32")
    for output in model.graph.output:
        output.type.tensor_type.ClearField("shape")
    results = runtime.InferenceSession(model.SerializeToString()).run(None, feeds)
    for name, result, wanted in zip(
        (output.name for output in model.graph.output),
        results,
        reference(tensors(model, feeds)),
        strict=True,
    ):
        np.testing.assert_allclose(result, wanted.numpy(), rtol=1e-3, atol=1e-4, err_msg=name)


@pytest.mark.parametrize(
    ("kind", "attributes", "message"),
    [
        ("FusedMatMulActivation", {"activation": "Softsign"}, "attribute activation is .Softsign"),
        ("FusedGemm", {"activation": "Softsign"}, "attribute activation is .Softsign"),
        ("NoSuchOperator", {}, "com.microsoft.NoSuchOperator: 1"),
    ],
)
def test_what_is_not_supported_is_refused(kind, attributes, message):
    nodes = [helper.make_node(kind, ["x", "w"], ["y"], domain=MICROSOFT, **attributes)]
    model = models.model_of(nodes, {"x": [2, 3]}, {"w": normal(3, 3)})
    model.opset_import.append(helper.make_opsetid(MICROSOFT, 1))
    with pytest.raises(UnsupportedOperatorError, match=message):
        from_model(model)


def test_shapes_behind_fused_operators_are_known():
    """A shape that is computed from their results is folded, also before ONNX's own version of the
    normalisation."""
    nodes = [
        helper.make_node("FusedMatMul", ["x", "w"], ["a"], domain=MICROSOFT, transB=1),
        helper.make_node("BiasGelu", ["a", "b"], ["c"], domain=MICROSOFT),
        node("LayerNormalization", ["c", "g"], ["d"]),
        node("Shape", ["d"], ["shape"]),
        node("Slice", ["shape", "zero", "one"], ["batch"]),
        node("Concat", ["batch", "rest"], ["wanted"], axis=0),
        node("Reshape", ["d", "wanted"]),
    ]
    integers = {"zero": np.array([0]), "one": np.array([1]), "rest": np.array([6])}
    weights = {"w": normal(3, 4), "b": normal(3), "g": normal(3), **integers}
    model = models.model_of(nodes, {"x": ["n", 2, 4]}, weights, opset=13)
    imported = from_model(model)
    assert list(imported.params) == ["w", "b", "g"]
    assert str(imported.outputs["y"].shape) == "R.shape([n, 6])"


# Random numbers


def test_random_operators():
    nodes = [
        node("Bernoulli", ["p"], ["coins"], seed=3.0),
        node("RandomNormalLike", ["p"], ["noise"], mean=2.0, scale=0.5),
        node("RandomNormal", [], ["fixed"], shape=[20, 30], dtype=TensorProto.DOUBLE),
        node("RandomUniformLike", ["p"], ["between"], low=-1.0, high=3.0),
        node("RandomUniform", [], ["unit"], shape=[500]),
        node("Mul", ["p", "w"], ["scaled"]),
        node("Add", ["scaled", "noise"]),
    ]
    outputs = ("y", "coins", "noise", "fixed", "between", "unit")
    model = models.model_of(nodes, {"p": ["n", 1000]}, {"w": normal(1000)}, outputs)
    model.graph.output[3].type.tensor_type.elem_type = TensorProto.DOUBLE
    imported = from_model(model)
    assert imported.draws
    module = imported.with_loss(lambda bb, y, *more: bb.emit(relax.op.sum(y)))
    module = relax_grad.value_and_grad(module, "loss", wrt=["w"])
    call = models.compiled(module, None, "relax_grad")
    p = np.repeat(np.float32([[0.0], [1.0], [0.3], [0.8]]), 1000, 1)
    w = imported.params["w"].numpy()
    first, again, other = (call("main", np.array(seed), p, w) for seed in (1, 1, 2))
    y, coins, noise, fixed, between, unit = first
    assert not coins[0].any()
    assert coins[1].all()
    np.testing.assert_allclose(coins[2:].mean(1), [0.3, 0.8], atol=0.05)
    assert set(np.unique(coins)) == {0.0, 1.0}
    assert abs(noise.mean() - 2) < 0.05
    assert abs(noise.std() - 0.5) < 0.05
    assert fixed.shape == (20, 30)
    assert fixed.dtype == "float64"
    assert abs(fixed.std() - 1) < 0.1
    assert -1 <= between.min() < -0.9
    assert 2.9 < between.max() <= 3
    assert 0.4 < unit.mean() < 0.6
    np.testing.assert_allclose(y, p * w + noise, rtol=1e-5, atol=1e-6)
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    assert all((a != b).any() for a, b in zip(first, other, strict=True))
    _, (gradient,) = call("loss_adjoint", np.array(1), p, w)
    np.testing.assert_allclose(gradient, p.sum(0), rtol=1e-5)
